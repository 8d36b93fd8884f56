"""Exact cuts: a graph of kernels, what it costs to place them, and the cheapest placement with its proof."""
