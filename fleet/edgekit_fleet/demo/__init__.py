"""`edgekit fleet demo`: its script, its manager, its real device and the network of that device."""
