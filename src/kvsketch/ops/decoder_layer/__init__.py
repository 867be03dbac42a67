"""Small pieces of a decoder layer that eager torch spreads over many launches: norm, rotary, gated SiLU.

    rms_norm(x, weight, eps)                 weight * (x / sqrt(mean(x^2) + eps)) over the last dimension
    add_rms_norm(x, residual, weight, eps)   residual + x, and its norm
    rotate_both(q, k, cos, sin)              queries and keys rotated by the angles of their positions
    gated_silu(gate, up)                     silu(gate) * up

They matter only for single tokens, where a launch takes as long as its work. Rounding follows the models' own
code: the norm is computed in fp32, rounded to the model's dtype, then multiplied by the weight. There is no dispatch
here: without a kernel (`ops.kernel_for`) a model runs its own modules, whose formulas are in `reference.py`.
"""
