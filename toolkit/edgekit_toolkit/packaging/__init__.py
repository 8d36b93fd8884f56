"""Packages and recipes: assembled from a model, golden tensors and attachments, and signed."""
