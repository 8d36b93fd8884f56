"""Statistics that stay valid at any number of looks: for a device's canary and a fleet's gates."""
