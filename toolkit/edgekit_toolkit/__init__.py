"""The host side: import, optimise, quantize, measure and choose under a budget, pack, sign, report."""

import edgekit_runtime  # noqa: F401  # switches telemetry off, before a module of ours imports onnxruntime
