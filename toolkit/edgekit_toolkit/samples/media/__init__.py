"""Finds images and sound recordings, and converts them to samples of a model."""
