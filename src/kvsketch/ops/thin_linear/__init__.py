"""Products of a few rows with a large weight: the linear layers of a decode step.

With one token per row of the batch nearly all time of a step goes into reading the weights, each of them once. What is
then worth having: the reads in long runs, several weights of the same input in one launch (queries, keys and values;
gate and up), the addition to the residual stream in the same launch, and a start that overlaps the kernel before, whose
result only the input needs, not the weights.
"""
