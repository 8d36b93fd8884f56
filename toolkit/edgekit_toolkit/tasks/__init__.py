"""Decides the task of a package from the user's request or from the outputs of the source model."""
