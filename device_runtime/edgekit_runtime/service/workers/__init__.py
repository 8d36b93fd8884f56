"""Runs isolated models in worker processes, which are supervised and restarted."""
