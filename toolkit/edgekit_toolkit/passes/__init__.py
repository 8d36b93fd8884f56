"""Optimisation passes. A pass is kept only if the outputs of the model do not change.

The passes do not reduce the precision of numbers. The package `quantize` does that.
"""
