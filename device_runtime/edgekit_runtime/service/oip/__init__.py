"""Requests and responses of the Open Inference Protocol v2, and shared memory of clients."""
