"""Modelled costs of a model: operations, bytes, latency, energy and memory."""
