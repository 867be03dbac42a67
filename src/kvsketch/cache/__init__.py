"""The life of a token: both seams into transformers in one room. Read in this order:

compressed.py   seam 1, the cache that transformers sees; `update` is where a key arrives
layer.py        one layer of it: a slot table, the method that rewrites it, and what a forward reads
forward.py      what layers know of the forward that is under way
attention.py    seam 2, the function that models call to attend
chunks.py       several new tokens for a bounded table, and prompts that are streamed
document.py     attention to a text that others continue too

Beside this path:

continuing.py   caches that continue one document
making.py       which layers of a model are compressed, and with what
masks.py        what a query may see
row_sums.py     sums that the model's own attention computes anyway
checks.py       what is refused: attention that a table cannot serve, nan and inf
interrupted.py  forwards that were broken off
rollback.py     taking tokens back
latent.py       multi-head latent attention: slots of latent vectors
families.py     adapters for families that bypass seam 2
rotary.py       angles of a model's rotary embedding
streaming.py    how a prompt gets in: whole or chunk by chunk, by itself or under generate
doubt.py        how unsure the model was of an answer
replay/         what one kind of methods asks for: the model reads its text again, spans compressed in place, promises
learning.py     what a model learns once from texts: directions and maps
text.py         what was read, as a checksum
sessions.py     `use`, for callers that cannot pass a cache
memory.py       bytes that a cache takes, and a budget from bytes
overview.py     what a cache holds, in five lines
saving/         caches as checked files
patches.py      wrappers around functions of other libraries, and how they go
"""
