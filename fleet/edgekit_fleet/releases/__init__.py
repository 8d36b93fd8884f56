"""Releases: sets of packages that are approved together, and the repository that serves them."""
