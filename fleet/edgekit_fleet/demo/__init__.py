"""The command `edgekit fleet demo`: its steps, its manager, its real device and that device's network."""
