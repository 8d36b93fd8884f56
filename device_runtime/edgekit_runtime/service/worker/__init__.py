"""The worker process of an isolated model, started with `python -m edgekit_runtime.service.worker`."""
