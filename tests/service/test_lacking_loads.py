"""Versions that a service without descriptors loads: none is rejected for it, and each is tried again."""

import contextlib
import dataclasses
import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.descriptor_parts import without_descriptors
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import (
    Replies,
    Running,
    ask,
    get_bytes,
    infer_bytes,
    make_config,
    post_bytes,
    running,
)
from tests.service.wiring_parts import ENDLESS, FailingVerifier, X, load, statistics, write
from tests.service.worker_parts import ask_again, find_model, kill
from tests.waiting import wait_for

from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.models.version_policy import VersionPolicy
from edgekit_runtime.service.options.model import Isolation, ModelOptions
from edgekit_runtime.service.serving import loader
from edgekit_runtime.service.workers import restart_policy, worker_handle
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.slots import HEALTHY, MAX_BEGUN, Slots
from edgekit_runtime.trust.trust_store import TrustStore

MOST = 14  # descriptors that a load has at one time, at most
LOAD = post_bytes("/v2/repository/models/linear/load", b"")
INFER = infer_bytes(X)


@pytest.fixture
def slots(maker: PackageMaker, tmp_path: Path) -> Slots:
    """Slots with `linear` 1.0.0, which has proved itself."""
    found = Slots(tmp_path / "state", maker.trust)
    found.install(write(maker, tmp_path, "1.0.0"))
    found.begin_start("linear").package.close()
    found.confirm("linear", "1.0.0")
    return found


def current(slots: Slots) -> tuple[str, str, int]:
    state = slots.load("linear").state
    assert state.current is not None
    assert state.rejected == ()
    return state.current.version, state.current.health, state.current.begun


@contextlib.contextmanager
def serving(
    slots: Slots, isolation: Isolation | None = None, options: ModelOptions | None = None
) -> Iterator[Running]:
    options = options or ModelOptions()
    if isolation is not None:
        options = dataclasses.replace(options, isolated=True, isolation=isolation)
    config = make_config(slots.folder.parent, models={"linear": options})
    with running(config, InstalledModels(slots)) as service:
        yield service


def assert_served(service: Running, version: str, options: ModelOptions) -> None:
    if options.rollout == "swap":
        assert ask_again(service, INFER).json["model_version"] == version
    else:
        assert statistics(service)["rollout"]["candidate_version"] == version


class Asking:
    """A client whose connection was there before the service had no descriptor left."""

    def __init__(self, client: Any) -> None:
        self._client, self._replies = client, Replies(client)

    def ask(self, request: bytes) -> Any:
        self._client.sendall(request)
        return self._replies.next()


@contextlib.contextmanager
def asking(service: Running) -> Iterator[Asking]:
    with service.connect() as client:
        asker = Asking(client)
        assert asker.ask(get_bytes("/v2/health/live")).status == 200
        yield asker


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: threads that other tests have left may need a descriptor too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


def test_package_without_descriptors_is_not_called_bad(
    maker: PackageMaker, tmp_path: Path, process: ProcessPoolExecutor
) -> None:
    path = write(maker, tmp_path, "1.0.0")
    for spare, count in enumerate((3, 3, 0)):
        lacks, names = process.submit(try_read, path, maker.trust, spare).result()
        assert ["Too many open files" in text for text in lacks] == [True] * count
        assert names == ["linear"]


def try_read(path: Path, trust: TrustStore, spare: int) -> tuple[list[str], Sequence[str]]:
    """Read a package in three ways with so many descriptors; returns what they lack, and names after it."""
    PackageFiles([path.parent], trust).find("linear", VersionPolicy())  # imports what reading needs
    source, lacks = PackageFiles([path.parent], trust), []
    with without_descriptors(os.getpid(), spare):
        for read in (
            lambda: read_package(path, trust).close(),
            source.names,
            lambda: source.find("linear", VersionPolicy()),
        ):
            try:
                read()
            except UnavailableError as error:  # noqa: PERF203  # the others too
                lacks.append(str(error))
    return lacks, source.names()


def try_open(path: Path, trust: TrustStore, spare: int) -> bool:
    """Return whether a model opens with so many descriptors; the engine is imported before."""
    with read_package(path, trust) as package:
        open_session(package).close()
        try:
            with without_descriptors(os.getpid(), spare):
                open_session(package).close()
        except UnavailableError:
            return False
    return True


def test_model_without_descriptors_is_not_called_bad(
    maker: PackageMaker, tmp_path: Path, process: ProcessPoolExecutor
) -> None:
    path = write(maker, tmp_path, "1.0.0")
    opened = [process.submit(try_open, path, maker.trust, spare).result() for spare in range(5)]
    assert opened[:2] == [False, False]
    assert opened[4]


@pytest.mark.parametrize("spare", range(8))
def test_starts_without_descriptors_count_for_nothing(
    maker: PackageMaker, tmp_path: Path, slots: Slots, spare: int
) -> None:
    slots.install(write(maker, tmp_path, "2.0.0"))
    load_one = partial(loader.load, options=ModelOptions())
    for _ in range(MAX_BEGUN + 2):
        source = InstalledModels(slots)  # of a service that was started again
        try:
            with without_descriptors(os.getpid(), spare):
                loaded = source.open("linear", VersionPolicy(), load_one)
        except UnavailableError:
            assert current(slots) == ("2.0.0", "unproven", 0)
            continue
        assert loaded[0].manifest.version == "2.0.0"
        loaded[0].close()
        source.confirm("linear", "2.0.0")
    assert InstalledModels(slots).open("linear", VersionPolicy(), load_one)[0].manifest.version == "2.0.0"


@pytest.mark.parametrize("options", [ModelOptions(), ENDLESS], ids=["swap", "canary"])
@pytest.mark.parametrize("isolation", [None, Isolation()], ids=["inside", "isolated"])
def test_version_is_loaded_later_where_descriptors_lack(
    maker: PackageMaker,
    tmp_path: Path,
    slots: Slots,
    monkeypatch: pytest.MonkeyPatch,
    options: ModelOptions,
    isolation: Isolation | None,
) -> None:
    monkeypatch.setattr(restart_policy, "MAX_FIRST_REFUSALS", 1)  # the waits between them are long
    with serving(slots, isolation, options) as service, asking(service) as asker:
        slots.install(write(maker, tmp_path, "2.0.0"))
        for spare in range(MOST):
            with without_descriptors(os.getpid(), spare):
                status = asker.ask(LOAD).status
            if status == 200:
                break
            assert status == 503
            assert current(slots) == ("2.0.0", "unproven", 0)
        assert spare
        assert load(service).status == 200
        assert current(slots)[0] == "2.0.0"
        assert_served(service, "2.0.0", options)


LACKS_IN_WORKER = """
import os, resource, sys
def look(event, found):
    if event == "open" and str(found[0]).startswith("/proc/self/fd/") and os.path.exists({flag!r}):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
if "edgekit_runtime.service.worker" in sys.orig_argv:
    sys.addaudithook(look)
"""


@pytest.mark.long
@pytest.mark.parametrize("options", [ModelOptions(), ENDLESS], ids=["swap", "canary"])
def test_version_is_loaded_later_where_descriptors_lack_in_its_worker(
    maker: PackageMaker, tmp_path: Path, slots: Slots, monkeypatch: pytest.MonkeyPatch, options: ModelOptions
) -> None:
    flag = tmp_path / "flag"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(LACKS_IN_WORKER.format(flag=str(flag)))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(restart_policy, "MAX_FIRST_REFUSALS", 2)
    with serving(slots, Isolation(), options) as service:
        slots.install(write(maker, tmp_path, "2.0.0"))
        flag.touch()
        for _ in range(MAX_BEGUN + 1):
            reply = load(service)
            assert (reply.status, "Too many open files" in reply.json["error"]) == (503, True)
            assert current(slots) == ("2.0.0", "unproven", 0)
            if options.rollout != "swap":  # it lacks descriptors from now on
                kill(service, signal.SIGKILL)
                flag.unlink()
                ask_again(service, INFER)
                flag.touch()
        flag.unlink()
        assert load(service).status == 200
        assert_served(service, "2.0.0", options)


def test_version_is_tried_later_where_the_one_in_use_has_no_process(
    maker: PackageMaker, tmp_path: Path, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with serving(slots, Isolation(start_timeout_s=6.0, max_delay_s=0.5), ENDLESS) as service:
        slots.install(write(maker, tmp_path, "2.0.0"))
        monkeypatch.setattr(worker_handle, "ChildProcess", fail)
        model = find_model(service)
        kill(service, signal.SIGKILL)
        # A load before the loss is noticed goes to the process that is ending.
        wait_for(lambda: not service.call(lambda: model.ready), "the loss of the process")
        reply = load(service)
        assert (reply.status, "no process of the version in use" in reply.json["error"]) == (503, True)
        assert current(slots) == ("2.0.0", "unproven", 0)
        monkeypatch.undo()
        ask_again(service, INFER)
        assert load(service).status == 200
        assert_served(service, "2.0.0", ENDLESS)


def test_model_that_could_not_be_loaded_at_the_start_is_loaded_by_its_next_request(
    slots: Slots,
) -> None:
    trust = FailingVerifier(slots.trust, is_gone=True)
    with serving(dataclasses.replace(slots, trust=trust)) as service:
        assert ask(service, INFER).status == 503
        trust.is_gone = False
        assert ask(service, INFER).json["model_version"] == "1.0.0"


def test_new_version_does_not_serve_without_a_trial_where_the_one_in_use_cannot_be_opened_now(
    maker: PackageMaker, tmp_path: Path, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise UnavailableError("not now")

    slots.install(write(maker, tmp_path, "2.0.0"))
    monkeypatch.setattr(InstalledModels, "open_again", fail)
    with serving(slots, options=ENDLESS) as service:
        assert ask(service, INFER).status == 503
        monkeypatch.undo()
        assert ask(service, INFER).status == 200
        assert_served(service, "2.0.0", ENDLESS)


def test_version_that_serves_well_is_recorded_once_there_are_descriptors(
    maker: PackageMaker, tmp_path: Path, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots.install(write(maker, tmp_path, "2.0.0"))
    source = InstalledModels(slots, confirm_after_s=0.5)
    with running(make_config(slots.folder.parent), source) as service:
        with without_descriptors(os.getpid()):
            time.sleep(1.5)
        assert current(slots) == ("2.0.0", "unproven", 1)
        assert ask(service, INFER).json["model_version"] == "2.0.0"
        wait_for(lambda: current(slots) == ("2.0.0", HEALTHY, 0), "the record")
