"""The flatbuffer schema of TFLite, imported when it is first needed (half a second and an optional extra)."""

import importlib
from types import ModuleType

from edgekit_runtime.errors import BackendError


def load_schema() -> ModuleType:
    """Return ai-edge-litert's generated schema with its object API.

    Raises:
        BackendError: ai-edge-litert is not installed.
    """
    try:
        return importlib.import_module("ai_edge_litert.schema_py_generated")
    except ImportError as cause:
        raise BackendError(
            f"writing TFLite needs ai-edge-litert ({cause}); pip install 'edgekit[litert]'"
        ) from cause
