"""Random numbers that depend on where they are used, not on when: a hash of a seed and integer coordinates.

A draw for (seed, layer, head, token) is the same on every device, for every chunking and in every order, so a method
that samples gives the same slots whole or chunked, alone or in a batch. `reference.py` computes it in torch, and
`kernel.py` holds the same functions for use inside Triton kernels, bit for bit.
"""

from kvsketch.ops.random.reference import gumbel, hash_combine, initial_state, to_uniform, uniform

__all__ = ["gumbel", "hash_combine", "initial_state", "to_uniform", "uniform"]
