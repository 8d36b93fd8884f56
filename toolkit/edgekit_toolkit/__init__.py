"""The host side: import, optimisation, quantization, measurement, choice under a budget, packages, report."""

import edgekit_runtime  # noqa: F401  # switches telemetry off, before a module of ours imports onnxruntime
