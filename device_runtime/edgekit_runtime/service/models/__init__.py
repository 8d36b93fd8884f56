"""The models of the service: sources, registry, lifecycle and the memory cap."""
