"""The records of our engines, a module each; importing one registers it and imports no engine.

`edgekit_runtime` imports this package, so the table is complete in every process of ours.
"""

from edgekit_runtime.engines import litert, offload, ort, tensorrt

__all__ = ["litert", "offload", "ort", "tensorrt"]
