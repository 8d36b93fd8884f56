"""Drift statistics: distance of a model's inputs and outputs from the calibration's, without labels."""
