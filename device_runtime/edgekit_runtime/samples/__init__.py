"""Samples on a device: which requests are drawn, which triggers they fit, and where they are stored."""
