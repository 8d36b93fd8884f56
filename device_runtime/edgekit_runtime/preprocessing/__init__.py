"""Converts images and sound to the inputs of a model."""
