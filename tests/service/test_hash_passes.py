"""How often the bytes of a whole package are hashed on the way from its installation to its first answer."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import make_config, running
from tests.service.wiring_parts import ENDLESS, load, make_model, served_version, write

from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.models.source import Source
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.options.resources import ModelMemory
from edgekit_runtime.slots import Slots

_CAP = ModelMemory(max_bytes=1 << 30)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "memory-cap": {"memory": _CAP},
    "canary-with-cap": {"memory": _CAP, "models": {"linear": ModelOptions(rollout=ENDLESS)}},
}


class Passes:
    """Counts hash passes over the model of each version, which is told by its size.

    Attributes:
        by_version: passes since the last `take`.
    """

    def __init__(self) -> None:
        self.by_version: Counter[str] = Counter()
        self._versions: dict[int, str] = {}
        self._sha256 = hashlib.sha256

    def expect(self, version: str, model: bytes) -> None:
        assert len(model) not in self._versions
        self._versions[len(model)] = version

    def take(self) -> dict[str, int]:
        found, self.by_version = dict(self.by_version), Counter()
        return found

    def sha256(self, data: Any = b"", **options: Any) -> Any:
        return _Counted(self._sha256(data, **options), len(data), self._count)

    def _count(self, size_bytes: int) -> None:
        if size_bytes in self._versions:
            self.by_version[self._versions[size_bytes]] += 1


class _Counted:
    """A hash that reports how many bytes it was fed, once it is asked for its digest."""

    def __init__(self, inner: Any, size_bytes: int, count: Callable[[int], None]) -> None:
        self._inner, self._size_bytes, self._count = inner, size_bytes, count

    def update(self, data: Any) -> None:
        self._inner.update(data)
        self._size_bytes += memoryview(data).nbytes

    def hexdigest(self) -> str:
        self._count(self._size_bytes)
        return str(self._inner.hexdigest())

    def digest(self) -> bytes:
        self._count(self._size_bytes)
        return bytes(self._inner.digest())


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    counted = Passes()
    monkeypatch.setattr(hashlib, "sha256", counted.sha256)
    return counted


@pytest.fixture
def make(maker: PackageMaker, passes: Passes, tmp_path: Path) -> Callable[[str], Path]:
    """Writes a version whose model has a size of its own."""

    def make_version(version: str) -> Path:
        model = make_model(batch="N" * int(version[0]))
        own = dataclasses.replace(maker, artifacts={**maker.artifacts, "model.onnx": model})
        path = write(own, tmp_path, version)
        passes.expect(version, model)
        return path

    return make_version


def test_installation_hashes_what_it_reads_and_what_it_wrote(
    maker: PackageMaker, make: Callable[[str], Path], passes: Passes, tmp_path: Path
) -> None:
    slots = Slots(tmp_path / "state", maker.trust)
    for version in ("1.0.0", "2.0.0"):
        slots.install(make(version))
        assert passes.take() == {version: 2}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("kind", ["slots", "files"])
def test_start_and_swap_hash_each_package_once(
    maker: PackageMaker,
    make: Callable[[str], Path],
    passes: Passes,
    tmp_path: Path,
    configuration: str,
    kind: str,
) -> None:
    slots = Slots(tmp_path / "state", maker.trust)
    config = make_config(tmp_path, **CONFIGURATIONS[configuration])

    def add(version: str) -> None:
        path = make(version)
        if kind == "slots":
            slots.install(path)
        passes.take()

    def open_source() -> Source:
        return InstalledModels(slots) if kind == "slots" else PackageFiles([tmp_path], maker.trust)

    add("1.0.0")
    with running(config, open_source()) as service:
        assert passes.take() == {"1.0.0": 1}
        add("2.0.0")
        assert load(service).status == 200
        assert passes.take() == {"2.0.0": 1}
        expected = "1.0.0" if configuration == "canary-with-cap" else "2.0.0"
        if expected == "2.0.0":
            assert served_version(service) == expected


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_start_amid_a_trial_hashes_each_of_both_versions_once(
    maker: PackageMaker, make: Callable[[str], Path], passes: Passes, tmp_path: Path, configuration: str
) -> None:
    slots = Slots(tmp_path / "state", maker.trust)
    for version in ("1.0.0", "2.0.0"):
        slots.install(make(version))
        if version == "1.0.0":
            slots.confirm("linear", version)
    passes.take()
    config = make_config(tmp_path, **CONFIGURATIONS[configuration])
    with running(config, InstalledModels(slots)):
        pass
    expected = {"2.0.0": 1} if configuration != "canary-with-cap" else {"1.0.0": 1, "2.0.0": 1}
    assert passes.take() == expected
