"""Loads verified packages as versions that answer calls."""
