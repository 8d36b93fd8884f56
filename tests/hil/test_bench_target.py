"""What packages of a bench are made for: its target or its profile, and the engine that it prefers."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.hil.evidence_parts import FACTS

from edgekit_hil.benches.bench_file import BenchSettings
from edgekit_hil.tests import bench_target
from edgekit_hil.tests.bench_target import BenchTarget
from edgekit_host.evidence import NetworkTimes
from edgekit_runtime.errors import BenchError
from edgekit_toolkit.targets.figures import Figure, Source, Status
from edgekit_toolkit.targets.loader import find_user_targets, load_target
from edgekit_toolkit.targets.spec import DeviceTimes
from edgekit_toolkit.targets.writer import write_target


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    bench_target._show_target.cache_clear()


def make_bench(target: str, *engines: str, name: str = "My_desk", keeps_state: bool = True) -> Any:
    facts = dataclasses.replace(FACTS, engines=dict.fromkeys(engines, "1"))
    settings = BenchSettings(name=name, kind="real", target=target, architecture="aarch64")
    return SimpleNamespace(facts=facts, file=SimpleNamespace(settings=settings, keeps_state=keeps_state))


def write_profile(
    name: str, *, device: str = FACTS.model, engine: str = "onnxruntime 1", status: Status = "measured"
) -> None:
    times = DeviceTimes(device, engine, "0a", {"dense": Figure(1.0, "s", status, "profile")})
    base = load_target("rpi5")
    source = Source("profile", "edgekit profile of a board", "2026-11-23", derivation="measured")
    target = dataclasses.replace(
        base, name=name, aliases=(), device_times=times, sources=(*base.sources, source)
    )
    write_target(find_user_targets() / f"{name}.toml", target)


@pytest.mark.parametrize(
    ("target", "engines", "expected"),
    [
        ("jetson-orin-nano", ("onnxruntime", "tensorrt"), ("tensorrt", "ort")),
        ("jetson-orin-nano", ("onnxruntime-gpu",), ("ort",)),
        ("android-arm64", ("onnxruntime", "ai-edge-litert"), ("litert", "ort")),
        ("rpi5", ("ai-edge-litert", "onnxruntime"), ("ort", "litert")),
    ],
)
def test_engine_that_the_target_prefers_comes_first(
    target: str, engines: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    found = BenchTarget.of(make_bench(target, *engines))

    assert (found.name, found.engines, found.engine) == (target, expected, expected[0])
    assert (found.predicted_engine == found.engine) == (expected != ("ort",))


def test_device_without_an_engine_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="the device has no engine"):
        _ = BenchTarget.of(make_bench("rpi5")).engine


def test_target_that_nobody_knows_is_refused() -> None:
    with pytest.raises(BenchError, match="`edgekit targets my-board`"):
        BenchTarget.of(make_bench("my-board"))


def test_profile_of_a_bench_takes_the_place_of_its_target() -> None:
    write_profile("rpi5-my-desk")

    found = BenchTarget.of(make_bench("rpi5", "onnxruntime"))
    other = BenchTarget.of(make_bench("rpi5", "onnxruntime", name="shelf"))

    assert (found.name, found.is_profile) == ("rpi5-my-desk", True)
    assert (other.name, other.is_profile) == ("rpi5", False)
    assert found.network_times == NetworkTimes("2026-11-23", "onnxruntime 1", "0a", {"dense": 1.0})


@pytest.mark.parametrize(
    ("profile", "keeps_state"),
    [
        ({"status": "estimated"}, True),
        ({"engine": "onnxruntime 2"}, True),
        ({"device": "another board"}, True),
        ({}, False),
    ],
    ids=["of an emulated device", "with another engine", "of another board", "of this machine"],
)
def test_times_that_are_not_those_of_the_device_as_it_is_are_no_evidence(
    profile: dict[str, Any], keeps_state: bool
) -> None:
    write_profile("rpi5-my-desk", **profile)

    found = BenchTarget.of(make_bench("rpi5", "onnxruntime", keeps_state=keeps_state))

    assert (found.is_profile, found.network_times) == (True, None)


def test_target_of_the_user_under_the_name_of_a_profile_is_not_used() -> None:
    board = dataclasses.replace(load_target("rpi5"), name="rpi5-my-desk", aliases=())
    write_target(find_user_targets() / "rpi5-my-desk.toml", board)

    assert BenchTarget.of(make_bench("rpi5", "onnxruntime")).name == "rpi5"
