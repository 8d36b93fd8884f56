"""Releases: packages that a fleet may get under one approval, and the repository that serves them."""
