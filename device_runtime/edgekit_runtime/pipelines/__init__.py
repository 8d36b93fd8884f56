"""Pipelines: packages of several models that run as one session."""
