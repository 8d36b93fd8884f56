"""The models of the service: sources, registry, lifecycle and memory limit."""
