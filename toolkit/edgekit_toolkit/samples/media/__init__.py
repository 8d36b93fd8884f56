"""Finds images and sound recordings, and decodes and preprocesses them to samples of a model."""
