"""Descriptions of targets: the hardware of a device class, its engines, and the costs of inference.

There is one TOML file per target in this folder. docs/reference/targets.md says how the figures were obtained
and how to add a target.
"""
