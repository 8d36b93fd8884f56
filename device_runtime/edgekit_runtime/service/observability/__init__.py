"""Metrics, logs and statistics of the service."""
