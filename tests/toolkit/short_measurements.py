"""Measures candidates briefly: no test depends on the speed of the machine it runs on.

Few and short rounds measure times, and no process is started to measure the memory of each candidate.
`python -m tests.toolkit.short_measurements ARGUMENTS` is `edgekit ARGUMENTS` that does so.
"""

import runpy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from edgekit_toolkit.evaluation import host_memory, judge
from edgekit_toolkit.measurement import device_profile
from edgekit_toolkit.measurement.peak_memory import PeakMemory, measure_engine_bytes
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.samples.generated import Feeds


def list_replacements() -> Iterator[tuple[Any, str, object]]:
    """Return module, name and value of what measures."""
    for name in ("LATENCY_LIMITS", "PROCESSOR_LIMITS"):
        limits = getattr(judge, name)
        yield judge, name, replace(limits, max_rounds=limits.min_rounds, batch_s=0.0005)
    yield device_profile, "HOST_S", 0.5
    for module in (judge, host_memory):
        yield module, "measure_model_memory", take_engine_and_file


def take_engine_and_file(model: Model, feeds: Feeds) -> PeakMemory:
    engine_bytes = measure_engine_bytes(model.engine)
    return PeakMemory(engine_bytes + len(model.content), engine_bytes)


def measure_briefly(*, with_memory: bool = False) -> None:
    """Do so until this process ends; `with_memory` measures memory nevertheless."""
    for module, name, value in list_replacements():
        if not (with_memory and value is take_engine_and_file):
            setattr(module, name, value)


if __name__ == "__main__":
    measure_briefly()
    runpy.run_module("edgekit_cli", run_name="__main__")
