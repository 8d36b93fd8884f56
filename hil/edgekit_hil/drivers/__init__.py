"""labgrid drivers for what labgrid has none: each by its module name in `imports` of an environment file."""
