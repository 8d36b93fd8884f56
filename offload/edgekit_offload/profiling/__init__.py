"""Measured costs of a model: `machine` measures, `model_profile` keeps, `planning_graph` joins machines."""
