"""Products of a few rows with a large weight: the linear layers of a decode step.

    linears(x, weights, biases)                x W^T + b for up to three weights W [out, in]; x [..., in]
    linear_onto(residual, x, weight, bias)     residual + (x W^T + b)
    gated_linear(x, gate, up)                  silu(x G^T) * (x U^T)

With one token per row of the batch nearly all time of a step goes into reading the weights, each of them once. What is
then worth having: the reads in long runs, several weights of the same input in one launch (queries, keys and values;
gate and up), the addition to the residual stream in the same launch, and a start that overlaps the kernel before, whose
result only the input needs, not the weights.

There is no dispatch here: without `ops.kernel_for`, or where `kernel.serves` says no, a model runs its own modules,
whose formulas `reference.py` holds.
"""
