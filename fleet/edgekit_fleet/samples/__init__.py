"""Samples from the field: who is asked for them, and where they lie, sealed."""
