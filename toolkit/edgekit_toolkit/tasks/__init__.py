"""Decides the task of a package: as the user states it, or as the source model's outputs show it."""
