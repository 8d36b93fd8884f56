"""Isolated models as the service sees them: worker processes, their supervision and restarts."""
