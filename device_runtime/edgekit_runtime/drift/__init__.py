"""Drift statistics: how far a model's inputs and outputs are from the calibration data, without labels."""
