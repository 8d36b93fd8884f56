"""What holds for every test: no telemetry. For property tests: how long they take decides nothing."""

from hypothesis import HealthCheck, settings

import edgekit_runtime  # noqa: F401  # switches telemetry off, before a test imports onnxruntime

settings.register_profile("edgekit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("edgekit")
