"""Optimisation passes: one a file, each a function on a copy, each kept only if the outputs stay equal.

It chooses no numbers of lower precision: that is what `quantize` does.
"""
