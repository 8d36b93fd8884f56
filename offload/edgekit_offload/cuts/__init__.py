"""Finds the cheapest placement of a graph of kernels, and proves that no other is cheaper."""
