"""Pushing versions and rollbacks to a fleet over MQTT. Nothing is implemented here yet."""
