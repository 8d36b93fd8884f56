"""The package format: archive, manifest, golden tensors, submodels and variants.

Source: docs/reference/package-format.md.
"""
