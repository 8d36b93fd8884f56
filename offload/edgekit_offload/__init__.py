"""Splitting a graph between device and cloud. Nothing is implemented here yet."""
