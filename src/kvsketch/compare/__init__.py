"""One prompt through many methods.

budgets.py          which methods at which budgets are compared, and budgets that are equal in bytes
shared_prefill.py   the model reads a prompt once; each method compresses a copy of what it computed
questions.py        every method answers the same questions about a text that it has compressed
doubt.py            from which doubt on an answer is asked again: the threshold of a model
"""
