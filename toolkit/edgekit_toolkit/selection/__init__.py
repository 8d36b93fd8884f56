"""Chooses a candidate within a budget."""
