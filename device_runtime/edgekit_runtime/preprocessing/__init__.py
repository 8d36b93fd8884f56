"""From photographs and recordings to inputs of a model."""
