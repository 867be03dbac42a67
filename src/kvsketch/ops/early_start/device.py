"""What a kernel that starts early does first."""

import triton
import triton.language as tl


@triton.jit
def wait(EARLY: tl.constexpr):
    """Lets the next kernel start, and waits for the one before."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
