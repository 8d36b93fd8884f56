"""A small synchronous client of the inference service, or of any Open Inference Protocol server.

It imports no engine and no module of the service. Client and service share the code in `protocol/`.
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
