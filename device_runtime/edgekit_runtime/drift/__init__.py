"""How far a model's inputs and outputs drift from those of its calibration, without labels."""
