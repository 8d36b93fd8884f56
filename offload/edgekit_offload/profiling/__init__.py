"""Measures, stores and combines the costs of a model on each machine."""
