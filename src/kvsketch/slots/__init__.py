"""What is stored, and the code that writes it.

table.py        the table of weighted slots of one layer
tensors.py      moves of the tensors that it holds
host.py         keys and values in host memory
hot_set.py      host rows that also lie on the device
offloaded.py    a table whose tokens moved to the host
heads.py        which heads of the model this process holds
"""

from kvsketch.slots.table import NEG_INF, SlotTable

__all__ = ["NEG_INF", "SlotTable"]
