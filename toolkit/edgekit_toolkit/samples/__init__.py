"""Reads, splits and generates samples of a model, from arrays, images and recordings."""
