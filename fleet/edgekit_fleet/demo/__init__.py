"""The command `edgekit fleet demo`: its steps, its manager, and a real device with its network."""
