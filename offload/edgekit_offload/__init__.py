"""Splits a model between device and server, based on measured costs."""
