"""Compression of a float model before quantization: second-order rounding of weights and channel pruning."""
