"""Where the tokens of a recalled cache lie when they are not on the device: the host store and the hot set.

- host.py: keys and values of one layer in host memory, pinned where a GPU reads them
- hot_set.py: the rows of it that also lie on the device, those read last
- offloaded.py: a slot table whose tokens moved there; sinks, tail and hot set stay on the device
"""
