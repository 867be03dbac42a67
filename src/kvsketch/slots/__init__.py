"""What is stored, and the code that writes it.

table.py        the weighted slots of one layer, exact or bounded: what is read, and how they are written
context.py      where a table stands in its model
parts.py        what follows the slots, by name and under one vocabulary
forward.py      what one forward knows of a layer
in_place.py     what a decode step changes of a table
packing.py      heads that have different numbers of slots
coding.py       when keys and values of a table are quantised
rollback.py     tokens that are taken back
latent.py       the same where a token is one latent vector
codes.py        keys and values in the dtype of the model, or quantised
short_rows.py   rows of a padded batch that are too short to be quantised
layout.py       where the slots of heads that differ in size lie
state.py        what a method remembers beside the slots
store.py        tables of many requests in one store, and the verbs that write them
rows.py         the store of our engine: rows on one clock, stretches of memory
documents.py    documents in the store of our engine, shared by its rows
pages.py        the store of vLLM: pages of a pool, requests that count their own tokens
padding.py      left padding
positions.py    how far a query finds itself from a slot
pauses.py       turns that others take between parts of long work
tensors.py      moves of the tensors that a table holds
bytes.py        bytes that a table will take
checks.py       what a table from a file must fulfil
host.py         keys and values in host memory
hot_set.py      host rows that also lie on the device
offloaded.py    a table whose tokens moved to the host
heads.py        which heads of the model this process holds
"""

from kvsketch.slots.context import LayerContext
from kvsketch.slots.parts import NEG_INF
from kvsketch.slots.table import SlotTable

__all__ = ["NEG_INF", "LayerContext", "SlotTable"]
