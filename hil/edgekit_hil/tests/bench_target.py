"""The target of a bench's packages, and the engine by which its device runs them."""

import functools
import json
import sys
from dataclasses import dataclass
from typing import Any, Final

import pytest

from edgekit_hil.benches.opening import Bench
from edgekit_host.evidence import MeasuredPower, NetworkTimes
from edgekit_runtime.agent.device_facts import DeviceFacts
from edgekit_runtime.errors import BenchError
from edgekit_runtime.system.child_process import run_program
from edgekit_runtime.system.engines import list_registered
from edgekit_runtime.system.paths import find_config_folder

TOOLKIT: Final = "edgekit_cli"
OPEN_LIMIT_S: Final = 900.0
"""The time limit for opening a package, in seconds. TensorRT builds its engine in this time."""
ENGINE_PACKAGES: Final = {
    engine.name: engine.installation.distributions for engine in list_registered() if engine.file_format
}

_SHOW_LIMIT_S: Final = 60.0
_MAX_OUTPUT_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """The target of a bench, beside the engines of its device.

    Attributes:
        name: target of packages: the bench's target or, if `edgekit profile --on` has measured this bench,
            its profile.
        engines: engines of the device, as packages name them; those that the target prefers come first.
        predicted_engine: engine for which latency and energy are predicted.
        is_profile: whether the predictions come from a profile of this bench.
        network_times: times behind the profile, for evidence; None without a profile of this device that
            states them.
    """

    name: str
    engines: tuple[str, ...]
    predicted_engine: str
    is_profile: bool
    network_times: NetworkTimes | None = None

    @classmethod
    def of(cls, bench: Bench) -> "BenchTarget":
        """Return the target of a bench.

        Raises:
            BenchError: there is no such target.
        """
        settings = bench.file.settings
        document = _show_target(settings.target)
        name, times = settings.profile_name, None
        has_file = (find_config_folder() / "targets" / f"{name}.toml").is_file()
        is_profile = has_file and bool(_show_target(name)["device_times"])  # else a target of the user
        if is_profile:
            document = _show_target(name)
            if bench.file.keeps_state:  # bench `local` is any machine: its times say nothing of others
                times = _read_times(document, bench.facts)
        preferred = [
            engine for engine in (document["backend"]["default"], document["backend"]["fallback"]) if engine
        ]
        there = [
            engine for engine, needed in ENGINE_PACKAGES.items() if bench.facts.engines.keys() & set(needed)
        ]
        engines = sorted(there, key=(*preferred, *ENGINE_PACKAGES).index)
        return cls(document["name"], tuple(engines), preferred[0], is_profile, times)

    @property
    def engine(self) -> str:
        """The engine that the tests use; a test is skipped if the device has none."""
        if not self.engines:
            pytest.skip("the device has no engine: `edgekit device install` puts one there")
        return self.engines[0]


def _read_times(document: dict[str, Any], facts: DeviceFacts) -> NetworkTimes | None:
    """Return the times of a profile if they are of this real device and its engine, or None."""
    times = document["device_times"]
    seconds = {
        name: figure["value"] for name, figure in times["seconds"].items() if figure["status"] == "measured"
    }
    if not seconds or times["device"] != facts.model or not facts.has_engine(times["engine"]):
        return None
    (date,) = (source["date"] for source in document["sources"] if source["key"] == "profile")
    power = document["power"]
    (active,) = (mode["active"] for mode in power["modes"] if mode["name"] == power["default_mode"])
    is_metered = active["source"] == "profile"
    measured = MeasuredPower(power["idle"]["value"], active["value"]) if is_metered else None
    return NetworkTimes(date, times["engine"], times["networks"], seconds, measured)


@functools.cache
def _show_target(name: str) -> dict[str, Any]:
    """Return the JSON of `edgekit targets NAME`."""
    command = [sys.executable, "-m", TOOLKIT, "targets", name, "--json"]
    done = run_program(command, (), _SHOW_LIMIT_S, _MAX_OUTPUT_BYTES)
    if done.exit_code != 0:
        raise BenchError(f"`edgekit targets {name}`: {done.last_line}")
    document: dict[str, Any] = json.loads(done.output)
    return document
