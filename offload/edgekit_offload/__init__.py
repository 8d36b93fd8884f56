"""Offload: split a model between device and server, from measured costs."""
