"""Statistics that stay valid however often one looks: for the canary on a device and for a fleet's gates."""
