"""Measures (`machine`), stores (`model_profile`) and combines (`planning_graph`) the costs of a model."""
