"""Measurements of memory and load on this machine."""
