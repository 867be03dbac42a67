"""What methods that score by a replay (`methods.replay`) ask of a cache; other methods need none of it.

repetition.py   the model reads its text again, for methods that choose by that
compaction.py   spans of a text that are compressed in place
promise.py      the smallest cache from which the model still says its text
probes.py       passages and lookups that test it
fitting.py      maps of a model in place of a repetition: the file, and methods that ask for it
"""
