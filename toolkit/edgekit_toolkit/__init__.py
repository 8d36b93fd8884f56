"""The host side: imports, optimises, quantizes, measures and packages models, and writes reports."""

import edgekit_runtime  # noqa: F401  # switches telemetry off, before a module of ours imports onnxruntime
