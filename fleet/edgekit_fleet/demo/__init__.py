"""`edgekit fleet demo`: its course, its manager, its real device and that device's network."""
