"""Scores of candidates on samples."""
