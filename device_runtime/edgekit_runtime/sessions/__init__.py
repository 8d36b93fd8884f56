"""Sessions, which are loaded models with the same interface for all engines."""

from edgekit_runtime.sessions.backends import open_choice, open_preferred, open_session
from edgekit_runtime.sessions.session import OpenBackend, Session
from edgekit_runtime.system.engines import (
    ENTRY_POINT_GROUP,
    Engine,
    EngineMissingError,
    Installation,
    register,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "Engine",
    "EngineMissingError",
    "Installation",
    "OpenBackend",
    "Session",
    "open_choice",
    "open_preferred",
    "open_session",
    "register",
]
