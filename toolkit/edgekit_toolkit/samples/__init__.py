"""Samples of a model: read from arrays, photographs and recordings, split, or generated."""
