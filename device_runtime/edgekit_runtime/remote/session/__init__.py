"""The session that offloads: what it runs, what it knows, and what it probes."""
