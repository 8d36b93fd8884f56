"""Chooses a candidate within a budget. These modules read no clock and no files."""
