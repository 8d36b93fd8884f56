"""Measures costs of a model (`machine`), stores (`model_profile`) and combines them (`planning_graph`)."""
