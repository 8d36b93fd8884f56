"""Engines that end the process which opens a package: the version is rejected, and all others are served."""

import json
import os
from pathlib import Path

import pytest
from tests.runtime.backend_parts import install_backend
from tests.runtime.conftest import PackageMaker
from tests.service.serve_parts import Served, environment
from tests.service.service_parts import X, ask, get_bytes, infer_bytes, make_config, running
from tests.service.tail_parts import scale_part, write_split
from tests.service.wiring_parts import index, infer, load, write
from tests.waiting import bounded

from edgekit_runtime.client import Client
from edgekit_runtime.errors import RequestError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.package.manifest import Variant
from edgekit_runtime.package.manifest_entries import BackendChoice
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.options.model import GovernorOptions, ModelOptions
from edgekit_runtime.service.options.rollout import CanaryOptions
from edgekit_runtime.sessions import local_results
from edgekit_runtime.sessions.local_results import is_opening_kept, keep_opening
from edgekit_runtime.slots import MAX_BEGUN, Slots

THIRD = BackendChoice("third", "model.onnx", {})
ABORTING = """
import os
def open_third(package, choice, threads):
    os.abort()
"""
RUNNING_OUT = """
import os, signal
def open_third(package, choice, threads):
    os.kill(os.getpid(), signal.SIGKILL)
"""
HANGING = """
import threading
def open_third(package, choice, threads):
    threading.Event().wait()
"""
# Opens the model with onnxruntime, and writes down in which process.
RECORDING = """
import os
from pathlib import Path
from edgekit_runtime.sessions.ort import open_ort
def open_third(package, choice, threads):
    print("an engine that talks")
    with Path({record!r}).open("a") as file:
        file.write(f"{{os.getpid()}}\\n")
    return open_ort(package, choice, threads)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def install_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (folder / "site").mkdir()
    install_backend(folder / "site", monkeypatch, source)


def open_before(maker: PackageMaker, path: Path) -> Path:
    """Let the package be one that was opened here before: it costs no child."""
    with read_package(path, maker.trust) as package:
        keep_opening(package, ())
    return path


def read_pids(folder: Path) -> list[int]:
    pids = [int(line) for line in (folder / "record").read_text().splitlines()]
    (folder / "record").unlink()
    return pids


@pytest.mark.parametrize("isolated", [None, True, pytest.param(False, marks=pytest.mark.long)])
def test_version_whose_engine_aborts_is_rejected_and_the_one_before_and_other_models_serve(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolated: bool | None
) -> None:
    install_engine(tmp_path, monkeypatch, ABORTING)
    slots = Slots(tmp_path / "state", maker.trust)
    slots.install(open_before(maker, write(maker, tmp_path, "1.0.0", name="other")))
    slots.install(open_before(maker, write(maker, tmp_path, "1.0.0")))
    slots.install(write(maker, tmp_path, "2.0.0", backend=THIRD))
    models = {"linear": ModelOptions(isolated=isolated)}
    with running(
        make_config(tmp_path, models=models), InstalledModels(slots), tries_in_child=True
    ) as service:
        assert infer(service).json["model_version"] == "1.0.0"
        assert ask(service, infer_bytes(X, path="/v2/models/other/infer")).status == 200
    (rejected,) = slots.load("linear").state.rejected
    assert (rejected.version, "SIGABRT" in rejected.reason) == ("2.0.0", True)


def test_canary_whose_engine_aborts_is_rejected_before_it_reaches_the_process_of_the_version_in_use(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path, monkeypatch, ABORTING)
    slots = Slots(tmp_path / "state", maker.trust)
    slots.install(open_before(maker, write(maker, tmp_path, "1.0.0")))
    options = ModelOptions(isolated=True, rollout="canary", canary=CanaryOptions(share=0.5))
    config = make_config(tmp_path, models={"linear": options})
    with running(config, InstalledModels(slots), tries_in_child=True) as service:
        assert infer(service).json["model_version"] == "1.0.0"
        slots.install(write(maker, tmp_path, "2.0.0", backend=THIRD))
        load(service, "linear")
        assert infer(service).json["model_version"] == "1.0.0"
        restarts = [model.restarts for model in service.service.workers.models]
    assert restarts == [0]
    (rejected,) = slots.load("linear").state.rejected
    assert (rejected.version, "SIGABRT" in rejected.reason) == ("2.0.0", True)


def test_package_file_whose_engine_aborts_is_refused_by_name_and_others_are_served(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path, monkeypatch, ABORTING)
    paths = [write(maker, tmp_path, "1.0.0", name="broken", backend=THIRD), write(maker, tmp_path, "1.0.0")]
    open_before(maker, paths[1])
    with running(make_config(tmp_path), PackageFiles(paths, maker.trust), tries_in_child=True) as service:
        assert infer(service).status == 200
        (reason,) = [line[3] for line in index(service) if line[0] == "broken"]
        assert "its engine ended the process that opened and tested it, by SIGABRT" in reason
        assert load(service, "broken").status == 500
        assert ask(service, get_bytes("/v2/health/live")).status == 200


def test_variant_of_a_governor_whose_engine_aborts_is_found_before_the_service_opens_it(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path, monkeypatch, ABORTING)
    third = Variant("third", THIRD, maker.manifest().golden, {})
    path = write(maker, tmp_path, "1.0.0", variants=(third,))
    config = make_config(tmp_path, models={"linear": ModelOptions(governor=GovernorOptions())})
    with running(config, PackageFiles([path], maker.trust), tries_in_child=True) as service:
        (reason,) = [line[3] for line in index(service) if line[0] == "linear"]
        assert "SIGABRT" in reason


def test_child_that_is_killed_for_memory_is_no_evidence_against_the_version(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path, monkeypatch, RUNNING_OUT)
    slots = Slots(tmp_path / "state", maker.trust)
    slots.install(write(maker, tmp_path, "1.0.0", backend=THIRD))
    with running(make_config(tmp_path), InstalledModels(slots), tries_in_child=True) as service:
        assert load(service, "linear").status == 503
    assert slots.load("linear").state.rejected == ()


def test_package_is_opened_in_a_child_the_first_time_and_for_another_release_only(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_engine(tmp_path, monkeypatch, RECORDING.format(record=str(tmp_path / "record")))
    source = PackageFiles([write(maker, tmp_path, "1.0.0", backend=THIRD)], maker.trust)

    def serve_once() -> list[int]:
        with running(make_config(tmp_path), source, tries_in_child=True) as service:
            assert infer(service).status == 200
        return read_pids(tmp_path)

    first, second = serve_once(), serve_once()
    metadata = tmp_path / "site" / "third-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    for pids in (first, serve_once()):
        assert (len(pids), pids[0] != os.getpid(), pids[1]) == (2, True, os.getpid())
    assert second == [os.getpid()]
    assert "cache folder" not in caplog.text  # although the engine prints


def test_engine_that_hangs_is_answered_by_503_and_rejects_the_version_at_the_third_time(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path, monkeypatch, HANGING)
    slots = Slots(tmp_path / "state", maker.trust)
    slots.install(write(maker, tmp_path, "1.0.0", backend=THIRD))
    config = make_config(tmp_path, models={"linear": ModelOptions(load_timeout_s=0.2)})
    with running(config, InstalledModels(slots), tries_in_child=True) as service:
        for begun in range(2, MAX_BEGUN + 1):
            reply = load(service, "linear")
            assert (reply.status, "not opened and tested within 0.2 s" in str(reply.json)) == (503, True)
            state = slots.load("linear").state
            assert (state.current.begun, state.rejected) == (begun, ())
        load(service, "linear")
    (rejected,) = slots.load("linear").state.rejected
    assert "begun 3 times" in rejected.reason


def test_proven_version_whose_engine_hangs_at_each_opening_is_rejected_and_the_one_before_serves(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path, monkeypatch, HANGING)
    slots = Slots(tmp_path / "state", maker.trust)
    before = open_before(maker, write(maker, tmp_path, "1.0.0"))  # a child may take longer than the limit
    for version, path in (("1.0.0", before), ("2.0.0", write(maker, tmp_path, "2.0.0", backend=THIRD))):
        slots.install(path)
        slots.confirm("linear", version)
    config = make_config(tmp_path, models={"linear": ModelOptions(load_timeout_s=1.5)})
    with running(config, InstalledModels(slots), tries_in_child=True) as service:
        for _ in range(MAX_BEGUN - 2):  # the service has tried once by itself
            assert load(service, "linear").status == 503
            assert slots.load("linear").state.rejected == ()
        assert load(service, "linear").status == 200
        assert infer(service).json["model_version"] == "1.0.0"
    (rejected,) = slots.load("linear").state.rejected
    assert (rejected.version, "took too long 3 times in a row" in rejected.reason) == ("2.0.0", True)


def test_only_the_newest_openings_are_remembered(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(local_results, "MAX_RESULTS", 9)
    with read_package(write(maker, tmp_path, "1.0.0"), maker.trust) as package:
        keep_opening(package, ("oldest",))
        os.utime(next((cache / "openings").iterdir()), (0, 0))
        for turn in range(9):
            keep_opening(package, (str(turn),))
        assert is_opening_kept(package, ("0",))
        assert not is_opening_kept(package, ("oldest",))
    assert len(list((cache / "openings").iterdir())) == 9


def test_openings_of_the_parts_of_a_package_are_all_remembered(maker: PackageMaker, tmp_path: Path) -> None:
    path = tmp_path / "split.edgepkg"
    write_split(maker, path, scale_part("cut1.tail", 2.0), scale_part("cut2.tail", 3.0))
    with read_package(path, maker.trust) as package:
        parts = [package, package.select_submodel("cut1.tail"), package.select_submodel("cut2.tail")]
        openings = [*((part, ()) for part in parts), (package, ("default",))]
        assert not any(is_opening_kept(*opening) for opening in openings)
        for opening in openings:
            keep_opening(*opening)
        assert all(is_opening_kept(*opening) for opening in openings)


@pytest.mark.long
@pytest.mark.parametrize("change", ["processor", "damage"])
def test_package_is_opened_in_a_child_again_for_another_processor_or_after_damage(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, change: str
) -> None:
    install_engine(tmp_path, monkeypatch, RECORDING.format(record=str(tmp_path / "record")))
    source = PackageFiles([write(maker, tmp_path, "1.0.0", backend=THIRD)], maker.trust)

    def count_openings() -> int:
        with running(make_config(tmp_path), source, tries_in_child=True) as service:
            assert infer(service).status == 200
        return len(read_pids(tmp_path))

    assert count_openings() == 2
    (kept,) = (cache / "openings").iterdir()
    if change == "processor":
        kept.write_text(json.dumps({**json.loads(kept.read_text()), "processor": "another"}))
    else:
        kept.write_bytes(b"\0")
    assert count_openings() == 2


def test_cache_that_cannot_be_written_costs_a_child_at_each_load_and_is_said(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "file"))
    source = PackageFiles([write(maker, tmp_path, "1.0.0")], maker.trust)
    with running(make_config(tmp_path), source, tries_in_child=True) as service:
        assert infer(service).status == 200
    assert "set EDGEKIT_CACHE to a folder of this user" in caplog.text


def test_command_serve_outlives_an_engine_that_aborts(
    maker: PackageMaker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(folder, monkeypatch, ABORTING)
    open_before(maker, folder / "linear.edgepkg")
    broken = write(maker, folder, "1.0.0", name="broken", backend=THIRD)
    variables = environment(folder)
    variables["PYTHONPATH"] = os.pathsep.join((str(folder / "site"), variables["PYTHONPATH"]))
    monkeypatch.setattr("tests.service.serve_parts.environment", lambda _: variables)
    service = Served(folder, "--package", str(broken))
    with bounded(service.process), Client(str(service.socket_path)) as client:
        service.wait_ready()
        with pytest.raises(RequestError, match="SIGABRT"):
            client.load("broken")
        assert service.end()[0] == 0
