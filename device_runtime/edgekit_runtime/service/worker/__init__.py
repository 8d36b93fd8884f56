"""The process of an isolated model: `python -m edgekit_runtime.service.worker`."""
