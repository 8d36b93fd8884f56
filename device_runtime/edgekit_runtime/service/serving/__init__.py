"""From a verified package to a version that answers calls."""
