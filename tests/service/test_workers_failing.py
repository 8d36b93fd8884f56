"""Workers that keep failing or misbehave, and services that die: who notices, and what is served instead."""

import errno
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.descriptor_parts import count_descriptors
from tests.runtime.conftest import PackageMaker
from tests.service.rogue_worker import ROGUES
from tests.service.serve_parts import served
from tests.service.service_parts import (
    Replies,
    Running,
    X,
    Y,
    ask,
    get_bytes,
    infer_bytes,
    make_config,
    post_bytes,
    running,
)
from tests.service.wiring_parts import load
from tests.service.worker_parts import OTHER, ask_again, find_model, find_pids, kill, running_isolated
from tests.waiting import is_running, wait_for

from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.protocol.rest import parse_infer_path
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.options.model import Isolation, ModelOptions
from edgekit_runtime.service.workers import isolated_model, worker_handle
from edgekit_runtime.slots import HEALTHY, REJECTED, UNPROVEN, Slots


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/v2/models/a/infer", ("a", None)),
        ("/v2/models/a%62/versions/1.0/infer", ("ab", "1.0")),
        ("/v2/models/a", None),
        ("/v2/models/a/ready", None),
        ("//v2/models/a/infer/", ("a", None)),
        ("/" * 2000 + "v2/models/a/infer", ("a", None)),
    ],
)
def test_path_of_an_inference_names_its_model(path: str, target: object) -> None:
    assert parse_infer_path(path) == target


@pytest.mark.parametrize(
    "wrong", [{"niceness": 20}, {"hang_s": 0.0}, {"max_crashes": 0}, {"max_data_bytes": -1}]
)
def test_isolation_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        from_plain(Isolation, wrong)


def test_worker_that_sends_garbage_is_ended_and_nothing_else(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    seeds = range(len(ROGUES) + 6) if is_long else range(0, len(ROGUES) + 1, 2)
    monkeypatch.setattr(worker_handle, "MODULE", "tests.service.rogue_worker")
    monkeypatch.setenv("ROGUE", str(seeds[0]))
    with running_isolated(maker, tmp_path, max_crashes=1000, max_delay_s=0.02, hang_s=600.0) as service:
        model = find_model(service)
        for seed, following in itertools.pairwise([*seeds, 0]):
            wait_for(lambda: service.call(lambda: len(model.ready)), f"the worker of {seed}")
            pid, restarts = find_pids(service)[0], model.restarts
            monkeypatch.setenv("ROGUE", str(following))  # of the next process
            check_others_beside_garbage(service)
            wait_for(lambda: service.call(lambda: model.restarts) > restarts, f"the one after {seed}")  # noqa: B023
            wait_for(lambda: not is_running(pid), f"the end of the worker of {seed}")  # noqa: B023


def check_others_beside_garbage(service: Running) -> None:
    with service.connect() as client:
        client.sendall(infer_bytes(X))
        with service.connect() as other:
            replies = Replies(other)
            for _ in range(3):
                other.sendall(infer_bytes(X, path=OTHER))
                assert replies.next().binary == Y
                time.sleep(0.02)
        assert Replies(client).next().status == 503
    assert ask(service, infer_bytes(X, path=OTHER)).binary == Y


def test_version_that_keeps_crashing_is_rejected_and_the_previous_one_serves(
    maker: PackageMaker, tmp_path: Path
) -> None:
    slots = Slots(tmp_path / "state", maker.trust, "x86-64")
    for version in ("1.0.0", "2.0.0"):
        path = tmp_path / f"{version}.edgepkg"
        maker.write(path, version=version)
        slots.install(path)
        if version == "1.0.0":
            slots.begin_start("linear").package.close()
            slots.confirm("linear", version)
    options = ModelOptions(isolated=True, isolation=Isolation(max_crashes=2))
    config = make_config(tmp_path, models={"linear": options})
    with running(config, InstalledModels(slots)) as service:
        assert ask(service, get_bytes("/v2/models/linear")).json["versions"] == ["2.0.0"]
        for _ in range(2):
            pid = kill(service, signal.SIGSEGV)
            wait_for(lambda pid=pid: not is_running(pid), "the end of the worker")
            ask_again(service, infer_bytes(X))
        served = get_bytes("/v2/models/linear")
        wait_for(lambda: ask(service, served).json["versions"] == ["1.0.0"], "the previous version")
        assert ask_again(service, infer_bytes(X)).binary == Y
    state = slots.load("linear").state
    assert [item.version for item in state.installed if item.health == REJECTED] == ["2.0.0"]


def test_version_that_crashed_is_not_confirmed_by_the_end_of_the_service(
    maker: PackageMaker, tmp_path: Path
) -> None:
    slots = Slots(tmp_path / "state", maker.trust, "x86-64")
    maker.write(tmp_path / "linear.edgepkg")
    slots.install(tmp_path / "linear.edgepkg")
    config = make_config(tmp_path, models={"linear": ModelOptions(isolated=True)})
    with running(config, InstalledModels(slots)) as service:
        kill(service, signal.SIGSEGV)
        assert ask_again(service, infer_bytes(X)).binary == Y
    current = slots.load("linear").state.current
    assert current is not None
    assert current.health == UNPROVEN


def test_workers_end_with_the_service_however_it_ends(folder: Path) -> None:
    with served(folder, "--isolate", "linear", is_copy=False) as service:
        parent = service.process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        (pid,) = map(int, children)
        os.kill(pid, signal.SIGSTOP)  # one that could not even notice
        service.process.kill()
    wait_for(lambda: not is_running(pid), "the end of the worker")


def refuse_starts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the system start no process `count` times."""
    left, start = [None] * count, worker_handle.ChildProcess

    def refuse(*arguments: Any, **options: Any) -> Any:
        if left:
            left.pop()
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(*arguments, **options)

    monkeypatch.setattr(worker_handle, "ChildProcess", refuse)


def serve_two_versions(maker: PackageMaker, folder: Path) -> Slots:
    slots = Slots(folder / "state", maker.trust, "x86-64")
    for version in ("1.0.0", "2.0.0"):
        maker.write(folder / f"{version}.edgepkg", version=version)
        slots.install(folder / f"{version}.edgepkg")
        slots.begin_start("linear").package.close()
        slots.confirm("linear", version)
    return slots


@pytest.mark.parametrize("refusals", [4, 1000])
def test_version_whose_process_the_system_does_not_start_is_not_rejected(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    slots = serve_two_versions(maker, tmp_path)
    refuse_starts(monkeypatch, refusals)
    models = {"linear": ModelOptions(isolated=True, isolation=Isolation(max_delay_s=0.25))}
    with running(make_config(tmp_path, models=models), InstalledModels(slots)) as service:
        if refusals > 4:  # for longer than is waited for
            monkeypatch.undo()
            assert ask(service, infer_bytes(X)).status == 503
            assert load(service).status == 200
        reply = ask_again(service, infer_bytes(X))
        assert (reply.json["model_version"], reply.binary) == ("2.0.0", Y)
    current = slots.load("linear").state.current
    assert current is not None
    assert (current.version, current.health) == ("2.0.0", HEALTHY)


def test_restarts_that_the_system_refuses_are_no_crashes_of_the_version(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = serve_two_versions(maker, tmp_path)
    models = {"linear": ModelOptions(isolated=True, isolation=Isolation(max_crashes=2, max_delay_s=0.1))}
    with running(make_config(tmp_path, models=models), InstalledModels(slots)) as service:
        refuse_starts(monkeypatch, 5)
        pid = kill(service, signal.SIGSEGV)
        wait_for(lambda: not is_running(pid), "the end of the worker")
        assert ask_again(service, infer_bytes(X)).json["model_version"] == "2.0.0"
        assert find_model(service).restarts == 1


def test_fault_while_a_process_is_begun_stops_no_other_loading(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    maker.write(packages / "other.edgepkg", name="other")
    models = {"linear": ModelOptions(isolated=True)}
    with running(make_config(tmp_path, models=models), PackageFiles([packages], maker.trust)) as service:

        def fail(*_: Any, **__: Any) -> None:
            raise ImportError("no descriptor for the file")

        maker.write(packages / "linear.edgepkg")
        load_linear = post_bytes("/v2/repository/models/linear/load", b"")
        before = count_descriptors()
        for name in ("__init__", "begin"):
            with monkeypatch.context() as patched:
                patched.setattr(isolated_model.IsolatedModel, name, fail)
                assert ask(service, load_linear).status == 503
        wait_for(lambda: count_descriptors() <= before, "closed descriptors")
        assert ask(service, post_bytes("/v2/repository/models/other/load", b"")).status == 200
        assert ask(service, load_linear).status == 200
        assert ask_again(service, infer_bytes(X)).binary == Y
