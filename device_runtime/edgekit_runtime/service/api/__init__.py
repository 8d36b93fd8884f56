"""The HTTP endpoints of the service."""
