"""The package format: archive, manifest, golden tensors and evidence.

Source: docs/reference/package-format.md.
"""
