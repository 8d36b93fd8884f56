"""Packages that carry a plan: submodels, tails and the cut table."""
