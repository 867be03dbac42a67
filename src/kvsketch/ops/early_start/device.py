"""What a kernel that starts early does first."""

import triton
import triton.language as tl


@triton.jit
def begin(LETS: tl.constexpr, WAITS: tl.constexpr):
    """Lets the next kernel start, if it can, and waits for the one before, if this one started early."""
    if LETS:
        tl.extra.cuda.gdc_launch_dependents()
    if WAITS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Both, for a kernel in a chain of such."""
    begin(EARLY, EARLY)
