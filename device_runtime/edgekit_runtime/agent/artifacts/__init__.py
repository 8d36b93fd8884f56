"""Files that the fleet offers, and their download."""
