"""What operations share.

dispatch      which implementation runs a call: the Triton kernel, the program in C or the torch reference
native        programs in C for a CPU: compiled at first use
device        what launch sizes depend on
early_start   launches that overlap the kernel before them
tensors       dtypes, strides and alignment that operations take
checks        what operations ask of the tensors they are given
kernel        Triton functions: products, tiles, order of floats, the start of a program
ragged        heads that hold different numbers of slots, one after the other in one flat store
quantised     Triton functions: levels, words of codes, rotation, products with them
sums          Triton functions: sums of exponentials, and the program that combines those of several splits
"""
