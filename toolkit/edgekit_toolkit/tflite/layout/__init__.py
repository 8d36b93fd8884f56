"""Chooses the order of axes in which each tensor is held."""
