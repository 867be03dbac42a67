"""Products of a few rows with a large weight: the linear layers of a decode step.

    linears(x, weights, biases)                x W^T + b for up to three weights W [out, in]; x [..., in]
    linear_onto(residual, x, weight, bias)     residual + (x W^T + b)
    gated_linear(x, gate, up)                  silu(x G^T) * (x U^T)

With one token per row of the batch, nearly all time of a step is reading the weights, each of them once. So these
kernels read in long runs, take several weights of the same input in one launch (queries, keys and values; gate and up),
add to the residual stream in the same launch, and start before the previous kernel ends, whose result the input needs
but not the weights.

There is no dispatch here: without a kernel (`ops.kernel_for`), or if `kernel.serves` is False, a model runs its own
modules, whose formulas are in `reference.py`.
"""
