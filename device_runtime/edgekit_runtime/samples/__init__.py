"""Samples from the field on a device: which requests are drawn, why they fit, where they wait."""
