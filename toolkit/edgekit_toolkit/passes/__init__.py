"""Optimisation passes: one a file, each a function on a copy, each kept only if the outputs stay equal.

It chooses no numbers of lower precision: that is what `quantize` does.
"""

from edgekit_toolkit.passes.pipeline import Optimised, PassResult, optimise

__all__ = ["Optimised", "PassResult", "optimise"]
