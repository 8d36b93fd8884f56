"""`edgekit fleet demo`: its course, its manager, its real device and the network of that."""
