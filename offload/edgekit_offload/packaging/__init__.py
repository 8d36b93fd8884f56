"""Writes packages with plans: their submodels, tails and cut tables."""
