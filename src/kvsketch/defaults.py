"""What commands, engines and caches use unless told otherwise; imports nothing, so that --help stays quick."""

METHOD = "rehearse:budget=1/2"
SHORT = 1024  # a text of fewer tokens is kept whole unless a method is named: its cache is small anyway
SEED = 0  # of random draws, and of sampling in commands
CHUNK = 2048  # tokens of a prompt that are read at a time
