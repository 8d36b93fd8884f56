"""Models whose load or self-test never ends: they are given up in time, and nothing else waits for them."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.backend_parts import install_backend
from tests.runtime.conftest import PackageMaker
from tests.runtime.slot_cases import write_keys
from tests.service.service_parts import Running, X, Y, infer_bytes, make_config, running
from tests.service.wiring_parts import (
    ENDLESS,
    endless,
    index,
    infer,
    load,
    metrics,
    served_version,
    unload,
    write,
)
from tests.service.worker_parts import ask_again
from tests.waiting import wait_for

from edgekit_runtime import Client
from edgekit_runtime.cli import main
from edgekit_runtime.errors import BackendError, SlotError
from edgekit_runtime.package.manifest_entries import BackendChoice
from edgekit_runtime.service.models import registry
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.memory_cap import estimate_bytes
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.models.source import Source
from edgekit_runtime.service.models.version_policy import Servable
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.options.resources import ModelMemory
from edgekit_runtime.service.serving.load_deadline import LoadAttempt, count_hung
from edgekit_runtime.slots import Slots

SHORT_S = 2.0
"""Long enough for a model that is well, also on a busy machine."""

HANGING = """
import threading

held = threading.Event()
begun = threading.Event()

class Session:
    from edgekit_runtime.tensors import TensorSpec
    inputs = (TensorSpec("x", "float32", ("N", 4)),)
    outputs = (TensorSpec("y", "float32", ("N", 2)),)
    closed = 0

    def run(self, inputs):
        begun.set()
        assert held.wait(60)
        raise RuntimeError("over")

    def close(self):
        type(self).closed += 1

def open_third(package, choice, threads):
    return Session()
"""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the backend `third`, whose runs hang until `held` is set."""
    (tmp_path / "site").mkdir()
    install_backend(tmp_path / "site", monkeypatch, HANGING)
    import third_backend  # type: ignore[import-not-found]

    yield third_backend
    third_backend.held.set()
    wait_for(lambda: not count_hung(), "the end of what hangs")


def write_hanging(maker: PackageMaker, folder: Path, name: str) -> Path:
    return write(maker, folder, "1.0.0", name=name, backend=BackendChoice("third", "model.onnx", {}))


def options(isolated: bool | None, **stated: Any) -> ModelOptions:
    return ModelOptions(isolated=isolated, **{"load_timeout_s": SHORT_S, **stated})


def state_of(service: Running, name: str) -> tuple[str, str]:
    (line,) = [line for line in index(service) if line[0] == name]
    return line[2:]


@pytest.mark.parametrize(
    ("kind", "isolated"),
    [
        ("slots", True),
        *(pytest.param("files", isolated, marks=pytest.mark.long) for isolated in (False, True)),
        pytest.param("slots", False, marks=pytest.mark.long),
    ],
)
def test_endless_self_test_at_the_start_is_given_up_and_later_models_serve(
    maker: PackageMaker, tmp_path: Path, kind: str, isolated: bool | None
) -> None:
    paths = [write(endless(maker), tmp_path, "1.0.0", name="endless"), write(maker, tmp_path, "1.0.0")]
    slots = Slots(tmp_path / "state", maker.trust)
    source: Source = PackageFiles(paths, maker.trust)
    if kind == "slots":
        for path in paths:
            slots.install(path)
        source = InstalledModels(slots)
    config = make_config(tmp_path, models={"endless": options(isolated, load_timeout_s=0.25)})
    with running(config, source) as service:
        assert infer(service).binary == Y
        state, reason = state_of(service, "endless")
        assert (state, "took longer than 0.25 s" in reason) == ("UNAVAILABLE", True)
    if kind == "slots":
        (rejected,) = slots.load("endless").state.rejected
        assert "took longer than 0.25 s" in rejected.reason
    assert count_hung() == 0


@pytest.mark.parametrize(
    ("kind", "isolated"),
    [
        ("swap", False),
        ("swap", True),
        pytest.param("canary", False, marks=pytest.mark.long),
        pytest.param("shadow", False, marks=pytest.mark.long),
        pytest.param("canary", True, marks=pytest.mark.long),
        pytest.param("shadow", True, marks=pytest.mark.long),
    ],
)
def test_new_version_with_an_endless_self_test_is_rejected_and_the_one_before_serves(
    maker: PackageMaker, tmp_path: Path, kind: Any, isolated: bool | None
) -> None:
    slots = Slots(tmp_path / "state", maker.trust)
    slots.install(write(maker, tmp_path, "1.0.0"))
    slots.begin_start("linear").package.close()
    slots.confirm("linear", "1.0.0")
    models = {"linear": options(isolated, rollout=kind, gates=ENDLESS.gates)}
    with running(make_config(tmp_path, models=models), InstalledModels(slots)) as service:
        slots.install(write(endless(maker), tmp_path, "2.0.0"))
        load(service)
        (rejected,) = slots.load("linear").state.rejected
        limit_s = models["linear"].load_timeout_s
        assert (rejected.version, f"took longer than {limit_s:g} s" in rejected.reason) == ("2.0.0", True)
        reply = ask_again(service, infer_bytes(X))
        assert (reply.json["model_version"], reply.binary) == ("1.0.0", Y)
        slots.install(write(maker, tmp_path, "3.0.0"))
        assert load(service).status == 200  # the model's next change goes on
    assert count_hung() == 0


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.long)])
def test_installation_of_an_endless_version_says_so_and_the_next_goes_on(
    maker: PackageMaker, tmp_path: Path, isolated: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_keys(tmp_path / "keys")
    slots = Slots(tmp_path / "state", maker.trust)
    slots.install(write(maker, tmp_path, "1.0.0"))
    config = make_config(tmp_path, models={"linear": options(isolated)})
    with running(config, InstalledModels(slots)) as service:
        places = [
            "--state",
            str(slots.folder),
            "--keys",
            str(tmp_path / "keys"),
            "--socket",
            service.socket_path,
        ]
        path = write(endless(maker), tmp_path, "2.0.0")
        assert main(["install", str(path), *places]) == SlotError.exit_code
        assert "linear 2.0.0: failed here and was rolled back" in capsys.readouterr().err
        assert served_version(service) == "1.0.0"
        assert main(["install", str(write(maker, tmp_path, "3.0.0")), *places]) == 0
        assert served_version(service) == "3.0.0"


@pytest.mark.parametrize("kind", ["swap", pytest.param("canary", marks=pytest.mark.long)])
def test_version_whose_load_the_end_of_the_service_cuts_short_is_not_rejected(
    maker: PackageMaker, tmp_path: Path, kind: Any
) -> None:
    slots = Slots(tmp_path / "state", maker.trust)
    slots.install(write(maker, tmp_path, "1.0.0"))
    slots.begin_start("linear").package.close()
    slots.confirm("linear", "1.0.0")
    models = {"linear": ModelOptions(isolated=True, rollout=kind, gates=ENDLESS.gates)}
    with running(make_config(tmp_path, models=models), InstalledModels(slots)) as service:
        slots.install(write(endless(maker), tmp_path, "2.0.0"))
        loading = threading.Thread(target=load, args=(service,), daemon=True)
        loading.start()
        wait_for(lambda: slots.load("linear").state.current.begun == 1, "the load")
    wait_for(lambda: slots.load("linear").state.current.begun == 0, "the count to be taken back")
    state = slots.load("linear").state
    assert (state.current.version, state.rejected) == ("2.0.0", ())


def test_while_a_model_is_loading_all_others_are_changed_and_served(
    maker: PackageMaker, tmp_path: Path, hanging: Any
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    write(maker, packages, "1.0.0")
    with running(make_config(tmp_path), PackageFiles([packages], maker.trust)) as service:
        write_hanging(maker, packages, "endless")
        loading = threading.Thread(target=load, args=(service, "endless"))
        loading.start()
        assert hanging.begun.wait(60)
        write(maker, packages, "2.0.0")
        assert load(service).status == 200
        assert (served_version(service), infer(service).binary) == ("2.0.0", Y)
        assert unload(service).status == 200
        write(maker, packages, "1.0.0", name="other")
        assert load(service, "other").status == 200
        assert state_of(service, "endless") == ("LOADING", "loading")
        hanging.held.set()
        loading.join(60)
        assert "over" in state_of(service, "endless")[1]


def test_model_that_loads_long_at_the_start_does_not_hold_up_those_after_it(
    maker: PackageMaker, tmp_path: Path, hanging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "NEXT_AFTER_S", 0.2)
    paths = [write_hanging(maker, tmp_path, "endless"), write(maker, tmp_path, "1.0.0")]
    config = make_config(tmp_path)
    started: list[Running] = []
    source = PackageFiles(paths, maker.trust)
    starting = threading.Thread(target=lambda: started.append(Running(config, source)))
    starting.start()
    assert hanging.begun.wait(60)
    with Client(config.listen.unix_socket) as client:
        wait_for(lambda: client.ready("linear"), "the model after it")
        assert not client.ready("endless")
    hanging.held.set()
    starting.join(60)
    started[0].stop()


def test_engine_that_cannot_be_stopped_is_left_behind_and_said(
    maker: PackageMaker, tmp_path: Path, hanging: Any
) -> None:
    paths = [write_hanging(maker, tmp_path, "endless"), write(maker, tmp_path, "1.0.0")]
    config = make_config(tmp_path, models={"endless": ModelOptions(load_timeout_s=0.2)})
    service = Running(config, PackageFiles(paths, maker.trust))
    try:
        assert infer(service).binary == Y
        assert "its engine cannot be stopped" in state_of(service, "endless")[1]
        assert "edgekit_hung_loads 1" in metrics(service)
    finally:
        has_ended = service.do(service.service.stop())
        service.halt()
    assert not has_ended  # so the process is ended, whatever hangs in it
    hanging.held.set()
    wait_for(lambda: not count_hung(), "the end of what hung")
    assert hanging.Session.closed == 1


def test_what_is_loaded_too_late_is_freed() -> None:
    may_end, freed = threading.Event(), []

    def work(_attempt: LoadAttempt[str]) -> str:
        assert may_end.wait(60)
        return "late"

    attempt = LoadAttempt("a model", work, freed.append)
    with pytest.raises(BackendError, match=r"a model: .* longer than 0.01 s .* restart the service"):
        attempt.result_within(0.01)
    assert count_hung() == 1
    may_end.set()
    wait_for(lambda: not count_hung(), "the end of the work")
    assert freed == ["late"]


def test_memory_of_a_model_that_is_loading_is_given_to_no_other(
    maker: PackageMaker, tmp_path: Path, hanging: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "NEXT_AFTER_S", 0.2)
    packages = tmp_path / "packages"
    packages.mkdir()
    path = write_hanging(maker, packages, "endless")
    cap = ModelMemory(max_bytes=int(1.5 * estimate_bytes([Servable("endless", "1.0.0", path, "")])))
    config = make_config(tmp_path, memory=cap)
    source = PackageFiles([packages], maker.trust)
    started: list[Running] = []
    starting = threading.Thread(target=lambda: started.append(Running(config, source)))
    write(maker, packages, "1.0.0")
    starting.start()
    assert hanging.begun.wait(60)
    with Client(config.listen.unix_socket) as client:
        wait_for(lambda: "the memory cap" in str(client.index()), "the word on the model after it")
    hanging.held.set()
    starting.join(60)
    try:
        assert infer(started[0]).binary == Y
    finally:
        started[0].stop()
