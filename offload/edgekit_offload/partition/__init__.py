"""Extracts head and tail of a cut as models, including the coding of the tensors that are sent."""
