"""Quantization: collects ranges, places Q/DQ nodes, stores weights and measures sensitivity."""
