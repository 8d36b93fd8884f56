"""Opens models in a process that may die of it."""
