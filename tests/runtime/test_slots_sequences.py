"""Long random sequences of what a device does, with failing disks and damaged files in between."""

import contextlib
import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
from tests.faults.disk_calls import AtStep, DiskCalls
from tests.memory_folder import tmp_path  # noqa: F401  # a fixture
from tests.runtime.slot_cases import MODEL, Bench, make_bench, start_fresh

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.slots import Permissions

SEQUENCES = 30  # of each seed
VERSIONS = [f"{number}.0.0" for number in range(8)]


@pytest.fixture(scope="module")
def packages(maker: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    for version in VERSIONS:
        maker.write(folder / f"{version}.edgepkg", version=version)
    return folder


def fail_at_random(chance: random.Random) -> AtStep:
    """Let calls work, or one fail, or all from some step on."""
    first, lasting = chance.randint(0, 30), chance.choice([None, False, True])
    number = chance.choice([errno.EIO, errno.ENOSPC])

    def fail(step: int, name: str) -> None:
        if (lasting is not None and step == first) or (lasting and step > first and name != "unlink"):
            raise OSError(number, os.strerror(number))

    return fail


def act(bench: Bench, chance: random.Random) -> None:
    """Do something at random."""
    slots, version = bench.slots, chance.choice(VERSIONS)
    current = slots.load(MODEL).state.current
    assert current is not None
    match chance.choice(["install", "install", "begin", "begin", "confirm", "reject", "rollback", "pin"]):
        case "install":
            allowed = Permissions(
                pin=chance.random() < 0.2, downgrade=chance.random() < 0.5, retry=chance.random() < 0.5
            )
            slots.install(bench.packages / f"{version}.edgepkg", allowed)
            installed = slots.load(MODEL).state.current
            assert installed is not None
            assert installed.version == version
        case "begin":
            bench.begin()
        case "confirm":
            slots.confirm(MODEL, current.version)
        case "reject":
            failed = chance.choice([current.version, version])
            if (instead := slots.reject(MODEL, failed, "failed")) is not None:
                instead.package.close()
                assert instead.version != failed
        case "rollback":
            slots.rollback(MODEL)
        case "pin":
            slots.pin(MODEL, chance.random() < 0.5)


def damage(bench: Bench, chance: random.Random) -> None:
    """Damage a package, as long as another one is whole, or the state."""
    _, places = bench.slots.examine(MODEL)
    whole = [place.path for place in places if place.problem is None]
    if len(whole) > 1 and chance.random() < 0.5:
        chance.choice(whole).unlink()
    elif chance.random() < 0.2:
        (bench.slots.folder / "models" / MODEL / "state.json").write_bytes(b"damaged")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_a_version_starts_after_every_step_of_a_random_sequence(
    seed: int,
    packages: Path,
    maker: Any,
    tmp_path: Path,  # noqa: F811
) -> None:
    chance = random.Random(seed)
    for number in range(SEQUENCES):
        root = tmp_path / str(number)
        folder = root / "state"
        root.mkdir()
        sound = make_bench(folder, packages, maker.trust)
        if chance.random() < 0.5:
            sound.install("0.0.0", factory=True)
        else:
            sound.prove("1.0.0")
        for _ in range(chance.randint(3, 15)):
            if chance.random() < 0.1:
                damage(sound, chance)
            else:
                calls = DiskCalls(root, fail_at_random(chance))
                with contextlib.suppress(EdgekitError), calls.installed():
                    calls.arm()
                    act(sound, chance)
            assert start_fresh(folder, maker.trust) in VERSIONS
