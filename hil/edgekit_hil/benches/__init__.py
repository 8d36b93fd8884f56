"""Benches: their environment files, opening a bench, and the device as tests use it."""
