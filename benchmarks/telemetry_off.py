"""Switches onnxruntime's telemetry off for a benchmark and its children: import this before onnxruntime."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
