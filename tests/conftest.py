"""Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before Triton is imported.

Hypothesis tries the same inputs in every run; KVSKETCH_FUZZ asks for so many new ones.
"""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
settings.register_profile("repeatable", derandomize="KVSKETCH_FUZZ" not in os.environ)
settings.load_profile("repeatable")
