"""The records of our engines, a module each; importing one registers it and imports no engine.

`edgekit_runtime` imports this package, so the table is complete in every process of ours.
"""

# In the order in which people are offered them.
from edgekit_runtime.engines import ort  # isort: skip
from edgekit_runtime.engines import litert, tensorrt  # isort: skip
from edgekit_runtime.engines import offload  # isort: skip

__all__ = ["litert", "offload", "ort", "tensorrt"]
