"""Targets: the hardware of each device class, its engines, and the costs of inference.

The data are TOML files in this folder, one a target. docs/reference/targets.md says how the figures were
obtained and how to add a target.
"""
