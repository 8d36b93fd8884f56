"""Checks that TensorRT accepts a model, on a machine without a GPU."""
