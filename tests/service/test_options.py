"""The options of the service: plain data that other processes can have, and cheap to import."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from edgekit_runtime.autotune.contest import MeasureOrder, RunSetting
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.package.archive import Limits
from edgekit_runtime.service.options import config, http, model, resources, rollout
from edgekit_runtime.service.worker_wire.messages import VerifiedPackage, WorkerSpec

MOST_MODULES = 24  # of ours, seven of them the records of the engines and what finds them
CHANGED = config.ServiceConfig(
    listen=config.Listen(unix_socket="/tmp/s.sock", port=9000),  # noqa: S108
    memory=resources.ModelMemory(max_bytes=1 << 30),
    power=resources.Power(power_w=5.0, battery_floor=0.2),
    models={
        "a": model.ModelOptions(
            specific=("1.0.0", "2.0.0"), threads=2, isolated=True, isolation=model.Isolation(processes=2)
        ),
        "b": model.ModelOptions(
            rollout="shadow",
            shadow=rollout.ShadowOptions(share=1.0, comparison="similarity"),
            gates=rollout.Gates(max_p50_ratio=0, max_duration_s=1e9),
            governor=model.GovernorOptions(deadline_ms=5.0, variants=("int8",), threads=(1, 2)),
        ),
    },
)
SPEC = WorkerSpec(
    config=CHANGED,
    isolation=model.Isolation(),
    name="a",
    package=VerifiedPackage("1.0.0", "0" * 64),
    limits=Limits(),
    token=None,
    connections=16,
)


def list_options() -> list[type[Any]]:
    """Return every dataclass of the rooms of options."""
    return [
        kind
        for module in (config, http, model, resources, rollout)
        for kind in vars(module).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
    ]


@pytest.mark.parametrize("kind", list_options(), ids=lambda kind: kind.__name__)
def test_options_survive_a_journey_as_json(kind: type[Any]) -> None:
    options = kind()
    assert from_plain(kind, json.loads(json.dumps(to_plain(options), allow_nan=False))) == options


@pytest.mark.parametrize(
    "options",
    [
        CHANGED,
        SPEC,
        MeasureOrder(
            package="p",
            manifest_sha256="0",
            keys="k",
            settings=(RunSetting(options=(("mode", True),)),),
            threads=1,
            rounds=2,
            end_s=3.0,
            seed=4,
        ),
    ],
    ids=["config", "worker", "contest"],
)
def test_messages_survive_a_journey_as_json(options: Any) -> None:
    plain = json.loads(json.dumps(to_plain(options), allow_nan=False))
    assert from_plain(type(options), plain) == options


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({"models": {"a": 3}}, "models.a: expected a table, got a number"),
        ({"models": {"a": {"gates": [1]}}}, "models.a.gates: expected a table, got a list"),
        ({"listen": None}, "listen: expected a table, got null"),
        ({"models": {"a": {"cache": None}}}, "models.a: cache is None, expected true or false"),
        ({"inference": {"max_json_bytes": 1.5}}, "inference: max_json_bytes is 1.5, expected a whole number"),
    ],
)
def test_wrong_value_is_refused_with_its_place(plain: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_plain(config.ServiceConfig, plain)
    assert str(caught.value) == said


def test_field_without_a_default_must_be_there() -> None:
    with pytest.raises(ConfigError, match="manifest_sha256"):
        from_plain(VerifiedPackage, {"version": "1.0.0"}, "order")


def test_configuration_is_cheap_to_import() -> None:
    program = (
        "import sys; import edgekit_runtime.service.options.config;"
        " print(*(name for name in sys.modules if name.partition('.')[0] in"
        " ('edgekit_runtime', 'asyncio', 'httptools', 'numpy')))"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    names = found.stdout.split()
    assert {name.partition(".")[0] for name in names} == {"edgekit_runtime"}
    assert len(names) <= MOST_MODULES, names
