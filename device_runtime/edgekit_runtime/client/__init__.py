"""A small synchronous client of the inference service, or of any that speaks the Open Inference Protocol.

It imports no engine and nothing of the service; both encode and decode with `protocol/`.
"""

from edgekit_runtime.client.client import Client

__all__ = ["Client"]
