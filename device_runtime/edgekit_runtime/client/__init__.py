"""A small synchronous client of the inference service, or of any that speaks the Open Inference Protocol.

It imports no engine and nothing of the service; both encode and decode with `protocol/`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgekit_runtime.client.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    """Import the client when it is used: it needs numpy, which commands that use `control` do not."""
    if name == "Client":
        from edgekit_runtime.client.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
