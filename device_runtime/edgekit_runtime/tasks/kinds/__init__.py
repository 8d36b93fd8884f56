"""The tasks, a module each."""
