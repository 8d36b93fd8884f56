"""A small synchronous client of the inference service, or of any that speaks the Open Inference Protocol.

It imports no engine, and of the service nothing but the protocol's names.
"""

from edgekit_runtime.client.client import Client

__all__ = ["Client"]
