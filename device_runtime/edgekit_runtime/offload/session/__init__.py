"""The session that offloads: its requests, its state, and its probes."""
