"""The offload session: its requests, its state and its probes."""
