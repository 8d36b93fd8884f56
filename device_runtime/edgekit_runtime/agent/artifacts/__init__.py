"""Files of the fleet: what it offers, and how they come here."""
