"""Encrypted samples of inputs from the field: which devices send them, and where they are stored."""
