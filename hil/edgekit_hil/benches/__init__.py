"""Benches: their environment files, how they are opened, and the device for tests."""
