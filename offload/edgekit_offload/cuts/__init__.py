"""Exact cuts: a graph of kernels, the costs of placing them, and the cheapest placement with its proof."""
