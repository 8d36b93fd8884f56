"""Models whose engines fail in ways that nobody expects: each is refused by name, and all others serve."""

from pathlib import Path
from typing import Any

import pytest
from tests.runtime.backend_parts import install_backend
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import Running, ask, get_bytes, make_config, running
from tests.service.wiring_parts import index, infer, load, write

from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.manifest_entries import BackendChoice
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.models.source import Source
from edgekit_runtime.service.options.model import Isolation, ModelOptions
from edgekit_runtime.service.serving.lane_factory import LaneFactory
from edgekit_runtime.service.workers import restart_policy
from edgekit_runtime.sessions.ort import OrtSession
from edgekit_runtime.slots import REJECTED, UNPROVEN, Slots

FAILING = """
def open_third(package, choice, threads):
    raise {error}
"""
THIRD = BackendChoice("third", "model.onnx", {})
ERRORS = ["TypeError('odd')", "ZeroDivisionError", "StopIteration", "RecursionError('deep')", "SystemExit(0)"]


@pytest.fixture(params=["files", "slots"])
def source(request: pytest.FixtureRequest, maker: PackageMaker, tmp_path: Path) -> Source:
    """`broken`, whose backend is `third`, and `linear`, which is well."""
    paths = [write(maker, tmp_path, "1.0.0", name="broken", backend=THIRD), write(maker, tmp_path, "1.0.0")]
    if request.param == "files":
        return PackageFiles(paths, maker.trust)
    slots = Slots(tmp_path / "state", maker.trust)
    for path in paths:
        slots.install(path)
    return InstalledModels(slots)


def fail_with(error: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "site").mkdir()
    install_backend(folder / "site", monkeypatch, FAILING.format(error=error))


def reason_of(service: Running, name: str) -> str:
    (line,) = [line for line in index(service) if line[0] == name]
    assert line[2] == "UNAVAILABLE"
    return line[3]


@pytest.mark.parametrize("error", ERRORS)
def test_model_whose_engine_raises_anything_is_refused_with_the_cause_and_others_are_served(
    source: Source,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fail_with(error, tmp_path, monkeypatch)
    kind = error.split("(")[0]
    with running(make_config(tmp_path), source) as service:
        assert infer(service).status == 200
        assert kind in reason_of(service, "broken")
        assert any(r.exc_info and r.exc_info[0] and r.exc_info[0].__name__ == kind for r in caplog.records)
        refused = load(service, "broken")
        assert (refused.status, kind in refused.json["error"]) == (500, True)
        assert infer(service).status == 200
        assert ask(service, get_bytes("/v2/health/live")).status == 200


@pytest.mark.parametrize("error", ["MemoryError", "OSError(24, 'Too many open files')"])
def test_model_whose_engine_lacks_what_the_machine_has_to_give_is_loaded_later(
    source: Source, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(error, tmp_path, monkeypatch)
    with running(make_config(tmp_path), source) as service:
        assert infer(service).status == 200
        refused = load(service, "broken")
        assert (refused.status, "broken" in refused.json["error"]) == (503, True)
        if isinstance(source, InstalledModels):
            assert Slots(tmp_path / "state", None).load("broken").state.rejected == ()  # type: ignore[arg-type]


def test_model_whose_engine_raises_anything_in_its_own_process_is_refused_with_the_cause(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with("TypeError('odd')", tmp_path, monkeypatch)
    config = make_config(tmp_path, models={"broken": ModelOptions(isolated=True)})
    with running(config, source) as service:
        assert infer(service).status == 200
        assert "TypeError: odd" in reason_of(service, "broken")


def test_newer_version_whose_engine_raises_anything_is_rejected_and_the_one_before_serves(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with("TypeError('odd')", tmp_path, monkeypatch)
    slots = Slots(tmp_path / "state", maker.trust)
    for version, changes in (("1.0.0", {}), ("2.0.0", {"backend": THIRD})):
        slots.install(write(maker, tmp_path, version, **changes))
    with running(make_config(tmp_path), InstalledModels(slots)) as service:
        assert infer(service).json["model_version"] == "1.0.0"
    (rejected,) = slots.load("linear").state.rejected
    assert (rejected.version, "TypeError: odd" in rejected.reason) == ("2.0.0", True)


def test_fault_of_the_service_while_it_takes_a_model_in_is_a_refusal_of_that_model(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = LaneFactory.make

    def make(self: LaneFactory, loaded: Any) -> Any:
        if loaded.manifest.name == "broken":
            raise KeyError("a fault of ours")
        return made(self, loaded)

    monkeypatch.setattr(LaneFactory, "make", make)
    paths = [write(maker, tmp_path, "1.0.0", name=name) for name in ("broken", "linear")]
    with running(make_config(tmp_path), PackageFiles(paths, maker.trust)) as service:
        assert infer(service).status == 200
        assert "a fault of ours" in reason_of(service, "broken")


@pytest.mark.parametrize("threads", [257, 2**31, 10**12, 10**25])
def test_package_that_asks_for_more_threads_than_a_machine_should_give_is_refused(
    maker: PackageMaker, tmp_path: Path, threads: int
) -> None:
    backend = BackendChoice("ort", "model.onnx", {"threads": threads})
    paths = [write(maker, tmp_path, "1.0.0", name="broken", backend=backend), write(maker, tmp_path, "1.0.0")]
    with running(make_config(tmp_path), PackageFiles(paths, maker.trust)) as service:
        assert infer(service).status == 200
        assert f"threads is {threads}, expected 1 to 256" in reason_of(service, "broken")


def test_setting_that_onnxruntime_does_not_take_is_a_refusal_of_the_backend(
    maker: PackageMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    class Choosy:
        def __setattr__(self, name: str, value: object) -> None:
            raise TypeError("incompatible function arguments")

    monkeypatch.setattr(onnxruntime, "SessionOptions", Choosy)
    with pytest.raises(BackendError, match="incompatible function arguments"):
        OrtSession(maker.artifacts["model.onnx"])


@pytest.mark.parametrize("limit", [None, 4 << 30], ids=["machine", "own limit"])
def test_memory_that_a_process_may_not_have_is_a_verdict_and_that_the_machine_lacks_is_none(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    fail_with("MemoryError", tmp_path, monkeypatch)
    monkeypatch.setattr(restart_policy, "MAX_FIRST_REFUSALS", 2)
    slots = Slots(tmp_path / "state", maker.trust)
    slots.install(write(maker, tmp_path, "1.0.0", name="broken", backend=THIRD))
    isolation = Isolation(max_data_bytes=limit, max_crashes=1, max_delay_s=0.05)
    options = ModelOptions(isolated=True, isolation=isolation)
    with running(make_config(tmp_path, models={"broken": options}), InstalledModels(slots)) as service:
        reason_of(service, "broken")
    current = slots.load("broken").state.current
    assert current is not None
    assert current.health == (UNPROVEN if limit is None else REJECTED)
