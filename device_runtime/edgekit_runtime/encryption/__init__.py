"""Encryption at rest: files that only the devices they are meant for can read, and the key of this device."""
