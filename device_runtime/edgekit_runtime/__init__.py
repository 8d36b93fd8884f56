"""The runtime of a device: it reads and verifies packages, and runs models in sessions on a backend.

It does not convert, quantize or measure models. `edgekit_toolkit` does that. This package imports no other
edgekit package, so a device installs only what it needs.

Importing this package disables the telemetry of onnxruntime in this process and its children, unless the
environment sets `ORT_DISABLE_TELEMETRY`.
"""

import os
from typing import TYPE_CHECKING, Any

from edgekit_runtime import engines  # noqa: F401  # registers them; it imports none

if TYPE_CHECKING:
    from edgekit_runtime.client import Client
    from edgekit_runtime.protocol.infer_request import SequenceStep
    from edgekit_runtime.sessions import open_session

__all__ = ["Client", "SequenceStep", "__version__", "open_session"]
__version__ = "0.1.0"

# From 1.29 on onnxruntime keeps an id and a database in the user's cache and sends events, unless this is set
# before its import; its own function that disables telemetry comes too late. Source: its Privacy.md.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def __getattr__(name: str) -> Any:
    """Import a name at its first use: applications often need only one half of the package."""
    if name == "Client":
        from edgekit_runtime.client import Client

        return Client
    if name == "SequenceStep":
        from edgekit_runtime.protocol.infer_request import SequenceStep

        return SequenceStep
    if name == "open_session":
        from edgekit_runtime.sessions import open_session

        return open_session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
