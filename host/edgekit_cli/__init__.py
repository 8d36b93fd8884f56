"""The `edgekit` command line. Each command is a file that exposes `command`, and `cli.py` lists them."""

import edgekit_runtime  # noqa: F401  # switches telemetry off, before a module of ours imports onnxruntime
