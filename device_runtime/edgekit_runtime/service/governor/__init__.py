"""Applies the decisions of the power governor to the service."""
