"""Targets: what each device class has, which engines run there, and what inference costs.

The data are TOML files in this folder, one a target. docs/reference/targets.md says how the figures were
obtained and how to add a target.
"""
