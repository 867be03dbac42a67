"""The life of a token: both seams into transformers in one room. Read in this order:

compressed.py   seam 1, the cache that transformers sees; `update` is where a key arrives
layer.py        one layer of it: a slot table and the method that rewrites it
view.py         what a forward reads of a layer; travels on the key tensor
attention.py    seam 2, the function that models call to attend
masks.py        what a query may see
families.py     adapters for families that bypass seam 2
rotary.py       angles of a model's rotary embedding
streaming.py    how a prompt gets in: whole or chunk by chunk, by itself or under generate
read.py         what was read, as a checksum
sessions.py     `use`, for callers that cannot pass a cache
checks.py       nan and inf by layer and head
saving/         caches as checked files
"""

from kvsketch.cache.compressed import CompressedCache

__all__ = ["CompressedCache"]
