"""Opens models in child processes, because an engine may crash on a model."""
