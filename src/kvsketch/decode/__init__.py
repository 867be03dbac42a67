"""Decoding and reading with a compressed cache.

captured.py     decode steps recorded as CUDA graphs
sampling.py     choice of tokens inside a graph
streaming.py    prompts that are read chunk by chunk
fused/          seam 3: decoder layers of known families in fewer kernels
"""
