"""Additional labgrid drivers, whose modules an environment file lists in `imports`."""
