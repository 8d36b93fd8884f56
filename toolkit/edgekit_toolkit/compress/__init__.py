"""Compression of a float model before it is quantized: second-order rounding of weights, pruned channels."""
