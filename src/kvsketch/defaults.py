"""What commands, engines and caches use unless told otherwise; imports nothing, so that --help stays quick."""

METHOD = "rehearse:budget=1/2"
SHORT = 1024  # a text of fewer tokens is kept whole unless a method is named: its cache is small anyway
SEED = 0  # of random draws, and of sampling in commands
CHUNK = 2048  # tokens of a prompt that are read at a time
FIT_TOKENS, FIT_LENGTH = 131_072, 4096  # of all texts that a model is fitted to, and of a part that is read at once
CPU_FIT_TOKENS, CPU_FIT_LENGTH = 4096, 512  # on a CPU, unless texts are named
