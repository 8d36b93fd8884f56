"""Drift statistics: how far inputs and outputs of a model are from those of its calibration; no labels."""
