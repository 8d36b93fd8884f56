"""A package whose engine is not on this device: refused at the installation, and never a verdict on it."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import PackageMaker
from tests.runtime.slot_cases import write_keys
from tests.service.service_parts import Running, make_config, running
from tests.service.wiring_parts import index, infer, load, write

from edgekit_runtime.cli import main
from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.manifest_entries import BackendChoice
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.options.model import Isolation, ModelOptions
from edgekit_runtime.service.workers import restart_policy
from edgekit_runtime.slots import UNPROVEN, Slots
from edgekit_runtime.system.install_hint import install_command

LITERT = BackendChoice("litert", "model.onnx", {})
ABSENT = BackendChoice("absent", "model.onnx", {})


@pytest.fixture
def without_litert(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in ("ai_edge_litert", "tflite_runtime"):
        monkeypatch.setitem(sys.modules, engine, None)


@pytest.fixture
def slots(maker: PackageMaker, tmp_path: Path) -> Slots:
    return Slots(tmp_path / "state", maker.trust)


def install(path: Path, folder: Path) -> int:
    write_keys(folder / "keys")
    place = ["--keys", str(folder / "keys"), "--state", str(folder / "state")]
    return main(["install", str(path), *place, "--socket", str(folder / "nobody")])


def state_of(service: Running) -> str:
    (line,) = index(service)
    return str(line[2])


@pytest.mark.usefixtures("without_litert")
def test_package_without_its_engine_is_refused_before_anything_is_written(
    maker: PackageMaker, slots: Slots, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = install(write(maker, tmp_path, "1.0.0", backend=LITERT), tmp_path)
    assert code == BackendError.exit_code
    assert install_command("litert") in capsys.readouterr().err
    assert slots.models() == ()


@pytest.mark.usefixtures("without_litert")
def test_package_with_a_fallback_that_is_here_is_installed(maker: PackageMaker, tmp_path: Path) -> None:
    fallback = BackendChoice("ort", "model.onnx", {"threads": 1})
    backend = BackendChoice("litert", "model.onnx", {}, fallback)
    assert install(write(maker, tmp_path, "1.0.0", backend=backend), tmp_path) == 0


def test_package_of_a_plug_in_that_is_not_here_is_refused(maker: PackageMaker, tmp_path: Path) -> None:
    assert install(write(maker, tmp_path, "1.0.0", backend=ABSENT), tmp_path) == BackendError.exit_code


@pytest.mark.parametrize("options", [ModelOptions(), ModelOptions(isolated=True)])
def test_version_whose_engine_is_missing_at_the_start_stays_and_the_log_names_the_engine(
    maker: PackageMaker, slots: Slots, tmp_path: Path, caplog: pytest.LogCaptureFixture, options: ModelOptions
) -> None:
    slots.install(write(maker, tmp_path, "1.0.0", backend=ABSENT))
    config = make_config(tmp_path, models={"linear": options})
    with caplog.at_level(logging.WARNING), running(config, InstalledModels(slots)) as service:
        assert state_of(service) == "UNAVAILABLE"
        assert "no backend 'absent'" in load(service).json["error"]
    state = slots.load("linear").state
    assert state.active is not None
    assert (state.active.health, state.active.begun, state.rejected) == (UNPROVEN, 0, ())
    assert "linear 1.0.0 stays installed and is not opened" in caplog.text


def test_version_before_serves_where_the_engine_of_the_newer_one_is_missing(
    maker: PackageMaker, slots: Slots, tmp_path: Path
) -> None:
    slots.install(write(maker, tmp_path, "1.0.0"))
    slots.begin_start("linear").package.close()
    slots.confirm("linear", "1.0.0")
    slots.install(write(maker, tmp_path, "2.0.0", backend=ABSENT))
    with running(make_config(tmp_path), InstalledModels(slots)) as service:
        assert infer(service).json["model_version"] == "1.0.0"
    state = slots.load("linear").state
    assert state.active is not None
    assert (state.active.version, state.rejected) == ("2.0.0", ())


def test_version_that_fails_beside_one_without_an_engine_is_rejected_once(
    maker: PackageMaker, slots: Slots, tmp_path: Path
) -> None:
    broken = BackendChoice("ort", "model.onnx", {"threads": "many"})
    for version, backend in (("1.0.0", broken), ("2.0.0", ABSENT)):
        slots.install(write(maker, tmp_path, version, backend=backend))
    with running(make_config(tmp_path), InstalledModels(slots)) as service:
        assert state_of(service) == "UNAVAILABLE"
    state = slots.load("linear").state
    assert [rejection.version for rejection in state.rejected] == ["1.0.0"]
    assert state.active is not None
    assert (state.active.version, state.active.health) == ("2.0.0", UNPROVEN)


def test_engine_that_is_installed_and_cannot_be_imported_in_a_worker_is_no_verdict(
    maker: PackageMaker, slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots.install(write(maker, tmp_path, "1.0.0"))
    site = tmp_path / "site" / "onnxruntime"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("raise ImportError('libfoo.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(site.parent))
    monkeypatch.setattr(restart_policy, "MAX_FIRST_REFUSALS", 2)
    isolation = Isolation(max_delay_s=0.05)  # between its starts
    options: dict[str, Any] = {"linear": ModelOptions(isolated=True, isolation=isolation)}
    with running(make_config(tmp_path, models=options), InstalledModels(slots)) as service:
        assert state_of(service) != "READY"
    state = slots.load("linear").state
    assert state.active is not None
    assert (state.active.health, state.active.begun, state.rejected) == (UNPROVEN, 0, ())
