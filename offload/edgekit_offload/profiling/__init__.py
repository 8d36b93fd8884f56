"""Measured costs of a model: `machine` measures them, `model_profile` stores, `planning_graph` joins."""
