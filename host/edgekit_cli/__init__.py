"""The `edgekit` command line: each command is one file that exposes `command`; `cli.py` lists them."""

import edgekit_runtime  # noqa: F401  # switches telemetry off, before a module of ours imports onnxruntime
