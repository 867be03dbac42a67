"""Reservoirs: slots that each hold one random token of a stream, by a law that is right after every token.

Token i fires in slot j when a 32-bit draw for (state, position of i, j) lies below its threshold; a slot holds the last
token that fired in it. With threshold 2^32 w_i / (w_1 + ... + w_i) a slot holds token i with probability w_i over the
total of all weights, whatever the length of the stream, and slots are independent. A stream cut into blocks gives the
very same slots. 32 bits, not the 23 of a float32: the probability of a late token is one over the length of the stream.

`reference.py` builds the whole matrix of draws, block by block; `kernel.py` keeps only the last firing of each slot.
`kvsketch.ops` chooses.

Legend: B batch rows, H KV heads, n tokens in stream order, S slots of a reservoir, C reservoirs per head.
"""

CERTAIN = 1 << 32  # the threshold below which every draw lies
