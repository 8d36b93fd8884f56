"""What holds for every test: no telemetry, no engine is fetched, and time decides nothing."""

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

import edgekit_runtime  # noqa: F401  # switches telemetry off, before a test imports onnxruntime

os.environ.setdefault("EDGEKIT_DEVICE_ENGINES", "off")
settings.register_profile("edgekit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("edgekit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of few tests: they have the long ones, and none of them is left for the end."""
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: counts[item.path])
