"""Measures a device, its server and the link between them, for the planner."""
