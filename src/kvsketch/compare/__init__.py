"""One prompt through many methods.

budgets.py          which methods at which budgets are compared, and budgets that are equal in bytes
shared_prefill.py   the model reads a prompt once; each method compresses a copy of what it computed
answers.py          every method answers; its divergence from the full cache
"""
