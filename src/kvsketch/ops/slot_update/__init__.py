"""The two in-place updates of a decode step: write the new token into its slot, and choose the slot that goes next.

Legend: B batch rows, H KV heads, S slots, D head size. Every tensor is modified in place, nothing is read back by the
host, so a captured graph can replay both.
"""

CLOSED = -2  # index of a slot that its row may never use
