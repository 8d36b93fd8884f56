"""Optimisation passes: one in each file, a function on a copy, kept only if the outputs stay equal.

They do not lower the precision of numbers; `quantize` does.
"""
