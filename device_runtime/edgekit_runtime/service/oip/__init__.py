"""Requests, responses and shared memory of the Open Inference Protocol v2."""
