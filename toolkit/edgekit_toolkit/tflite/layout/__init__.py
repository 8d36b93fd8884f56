"""Chooses the order in which the axes of each tensor are stored."""
