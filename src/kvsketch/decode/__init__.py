"""Decoding with a compressed cache.

asking.py       texts and questions in a model's chat template
captured.py     decode steps recorded as CUDA graphs
sampling.py     choice of tokens inside a graph
shared.py       decode steps of requests that share tables, with rows that join and leave
fused/          seam 3: decoder layers of known families in fewer kernels
"""
