"""Loading and unloading while models hang, disks are slow and clients fight over one model."""

import contextlib
import dataclasses
import logging
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.gates import ON_THREADS, Gate
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
from tests.service.wiring_parts import changed, index, infer, load, metrics, served_version, unload, write
from tests.waiting import wait_for

from edgekit_runtime import Client
from edgekit_runtime.errors import RequestError, SlotError
from edgekit_runtime.package.archive import read_unverified_manifest
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.memory_cap import estimate_bytes
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.models.version_policy import Servable
from edgekit_runtime.service.options.config import Inference
from edgekit_runtime.service.options.model import Isolation, ModelOptions
from edgekit_runtime.service.options.resources import ModelMemory
from edgekit_runtime.sessions.local_results import Tuned, keep_tuned
from edgekit_runtime.slots import Permissions, Slots

RETRY = Permissions(retry=True, downgrade=True)


def serve(maker: PackageMaker, packages: Path, *, drain_timeout_s: float = 0.5, **sections: Any) -> Any:
    sections = {"models": {"linear": ON_THREADS}, **sections}
    config = make_config(packages.parent, inference=Inference(drain_timeout_s=drain_timeout_s), **sections)
    return running(config, PackageFiles([packages], maker.trust))


def hang(service: Running, gate: Gate) -> socket.socket:
    """Return a client with a request that hangs."""
    gate.shut()
    client = service.connect()
    client.sendall(infer_bytes(X))
    models = service.service.registry.models
    wait_for(lambda: service.call(lambda: not models.find("linear", None).own_lane.is_idle))
    return client


def cap_for_one(path: Path) -> ModelMemory:
    """Return a cap that holds one model of the package at `path`, and half of another."""
    return ModelMemory(max_bytes=int(1.5 * estimate_bytes([Servable("m", "1", path, "")])), load_wait_s=20.0)


def test_unloading_a_model_that_hangs_ends_and_is_said(
    maker: PackageMaker, packages: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages) as service, hang(service, gate) as client:
        with caplog.at_level(logging.ERROR):
            assert unload(service).status == 200
        assert "linear 1.0.0: a call did not end within 0.5 s" in caplog.text
        assert 'edgekit_swaps_total{model="linear",outcome="hung"} 1' in metrics(service)
        gate.open()
        assert Replies(client).next().binary == Y
        wait_for(lambda: service.call(lambda: not service.service.registry._lifecycle.leaving))


@pytest.mark.parametrize("order", ["availability", "resource"])
def test_model_that_hangs_is_swapped_all_the_same(
    maker: PackageMaker, packages: Path, gate: Gate, order: Any
) -> None:
    write(maker, packages, "1.0.0")
    models = {"linear": dataclasses.replace(ON_THREADS, swap=order)}
    with (
        serve(maker, packages, models=models) as service,
        hang(service, gate) as client,
    ):
        write(changed(maker, 2.0), packages, "2.0.0")
        assert load(service).status == 200
        assert served_version(service) == "2.0.0"
        gate.open()
        assert Replies(client).next().binary == Y


def test_model_that_hangs_keeps_no_other_from_being_loaded(
    maker: PackageMaker, packages: Path, gate: Gate
) -> None:
    write(maker, packages, "1.0.0")
    write(maker, packages, "1.0.0", name="other")
    models = {"linear": dataclasses.replace(ON_THREADS, swap="resource")}
    with (
        serve(maker, packages, drain_timeout_s=600.0, models=models) as service,
        hang(service, gate) as client,
    ):
        thread = threading.Thread(target=load, args=(service,))
        thread.start()
        wait_for(lambda: ("linear", "", "LOADING", "loading") in index(service))
        assert load(service, "other").status == 200
        assert thread.is_alive()
        gate.open()
        thread.join(20)
        assert Replies(client).next().binary == Y


def test_memory_of_a_model_that_hangs_still_counts_under_the_cap(
    maker: PackageMaker, packages: Path, gate: Gate
) -> None:
    path = write(maker, packages, "1.0.0")
    write(maker, packages, "1.0.0", name="other")
    with serve(maker, packages, memory=cap_for_one(path)) as service:
        with hang(service, gate) as client:
            assert unload(service).status == 200
            reply = load(service, "other")
            assert (reply.status, "busy" in reply.json["error"]) == (503, True)
            gate.open()
            assert Replies(client).next().binary == Y
        wait_for(lambda: load(service, "other").status == 200)


def held_bytes(service: Running) -> int:
    def count() -> int:
        registry = service.service.registry
        held = [*registry.models.served(), *registry._lifecycle.leaving]
        return sum(served.loaded.memory_bytes for served in held)

    return int(service.call(count))


def test_model_with_a_call_that_runs_is_not_unloaded_for_another(
    maker: PackageMaker, packages: Path, gate: Gate
) -> None:
    cap = cap_for_one(write(maker, packages, "1.0.0"))
    write(maker, packages, "1.0.0", name="other")
    with serve(maker, packages, memory=cap, drain_timeout_s=20.0) as service:
        with hang(service, gate) as client:
            reply = load(service, "other")
            assert (reply.status, "busy" in reply.json["error"]) == (503, True)
            assert index(service)[0] == ("linear", "1.0.0", "READY", "")
            gate.open()
            assert Replies(client).next().binary == Y
        assert load(service, "other").status == 200


def test_request_waits_for_the_calls_of_the_model_in_its_way(
    maker: PackageMaker, packages: Path, gate: Gate
) -> None:
    cap = cap_for_one(write(maker, packages, "1.0.0"))
    write(maker, packages, "1.0.0", name="other")
    with serve(maker, packages, memory=cap) as service:
        with hang(service, gate) as client, service.connect() as second:
            second.sendall(infer_bytes(X, path="/v2/models/other/infer"))
            wait_for(lambda: ("other", "", "LOADING", "loading") in index(service))
            gate.open()
            assert Replies(client).next().binary == Y
            assert Replies(second).next().binary == Y
        assert [line[2] for line in index(service)] == ["UNAVAILABLE", "READY"]


def test_isolated_model_with_a_request_under_way_is_not_unloaded_for_another(
    maker: PackageMaker, packages: Path
) -> None:
    cap = cap_for_one(write(maker, packages, "1.0.0"))
    write(maker, packages, "1.0.0", name="other")
    models = {"linear": ModelOptions(isolated=True)}
    with serve(maker, packages, memory=cap, models=models) as service:
        request = infer_bytes(X)
        with service.connect() as client:
            replies = Replies(client)
            client.sendall(request)
            assert replies.next().binary == Y
            client.sendall(request[:-1])
            lane = service.call(lambda: service.service.registry.models.find("linear", None).own_lane)
            wait_for(lambda: not service.call(lambda: lane.is_idle))
            assert load(service, "other").status == 503
            client.sendall(request[-1:])
            assert replies.next().binary == Y
            assert load(service, "other").status == 200


def test_old_version_that_hangs_counts_under_the_cap_in_its_own_swap(
    maker: PackageMaker, packages: Path, gate: Gate
) -> None:
    cap = cap_for_one(write(maker, packages, "1.0.0"))
    models = {"linear": dataclasses.replace(ON_THREADS, swap="resource")}
    with serve(maker, packages, memory=cap, models=models) as service:
        with hang(service, gate) as client:
            write(changed(maker, 2.0), packages, "2.0.0")
            assert load(service).status == 503
            assert held_bytes(service) <= (cap.max_bytes or 0)
            gate.open()
            assert Replies(client).next().binary == Y
        assert served_version(service) == "2.0.0"


def made_for(maker: PackageMaker, backend: str) -> tuple[PackageMaker, BackendChoice]:
    """Return a maker of packages that have a model for LiteRT too, and the backend that they are to state."""
    pytest.importorskip("ai_edge_litert")
    from tests.runtime.tflite_models import linear

    artifacts = {**maker.artifacts, "model.tflite": linear()}
    maker = dataclasses.replace(maker, artifacts=artifacts, roles={**maker.roles, "model.tflite": "model"})
    return maker, BackendChoice(backend, "model.onnx" if backend == "ort" else "model.tflite", {"threads": 1})


@pytest.mark.parametrize(("backend", "status"), [("ort", 200), ("litert", 503)])
def test_instances_that_take_memory_each_count_each(
    maker: PackageMaker, packages: Path, backend: str, status: int
) -> None:
    maker, choice = made_for(maker, backend)
    cap = cap_for_one(write(maker, packages, "1.0.0", backend=choice))
    models = {"linear": ModelOptions(instances=2)}
    with serve(maker, packages, memory=cap, models=models) as service:
        reply = infer(service)
        assert (reply.status, status == 200 or "does not fit" in reply.json["error"]) == (status, True)


@pytest.mark.parametrize(
    ("isolation", "status"),
    [(Isolation(), 200), (Isolation(processes=2), 503), (Isolation(standby=True), 503)],
)
def test_each_process_of_an_isolated_model_counts(
    maker: PackageMaker, packages: Path, isolation: Isolation, status: int
) -> None:
    cap = cap_for_one(write(maker, packages, "1.0.0"))
    models = {"linear": ModelOptions(isolated=True, isolation=isolation)}
    with serve(maker, packages, memory=cap, models=models) as service:
        reply = infer(service)
        assert (reply.status, status == 200 or "does not fit" in reply.json["error"]) == (status, True)


@pytest.mark.parametrize(
    ("isolated", "instances", "left"), [(None, 1, 2), (None, 2, 1), (None, 20, 1), (True, 2, 1)]
)
def test_instances_that_tuning_found_count_each(
    maker: PackageMaker,
    packages: Path,
    monkeypatch: pytest.MonkeyPatch,
    isolated: bool | None,
    instances: int,
    left: int,
) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(packages.parent))
    maker, choice = made_for(maker, "litert")
    path = write(maker, packages, "1.0.0", backend=choice)
    tuned = Tuned("throughput", {}, instances)
    keep_tuned(read_unverified_manifest(path).manifest, choice, tuned)
    write(maker, packages, "1.0.0", name="other", backend=choice)
    cap = ModelMemory(max_bytes=int(2.5 * estimate_bytes([Servable("linear", "1.0.0", path, "")])))
    models = {"linear": ModelOptions(isolated=isolated)}
    with serve(maker, packages, memory=cap, models=models) as service:
        assert len(service.call(service.service.registry.models.served)) == left
        assert np.allclose(np.frombuffer(infer(service).binary, np.float32), X @ WEIGHT)


class SlowDisk(PackageFiles):
    """Packages on a disk that answers only while `is_up` is set."""

    __slots__ = ("is_up",)

    def __init__(self, paths: Sequence[Path], trust: Any) -> None:
        super().__init__(paths, trust)
        self.is_up = threading.Event()
        self.is_up.set()

    def names(self) -> Sequence[str]:
        assert self.is_up.wait(60)
        return super().names()


def test_service_is_not_ready_before_it_has_looked_up_its_models(maker: PackageMaker, packages: Path) -> None:
    write(maker, packages, "1.0.0")
    source = SlowDisk([packages], maker.trust)
    source.is_up.clear()
    config = make_config(packages.parent)
    with ThreadPoolExecutor(1) as thread, Client(config.listen.unix_socket) as client:
        starting = thread.submit(Running, config, source)
        try:
            wait_for(Path(config.listen.unix_socket).exists)
            assert not client.ready()
            with pytest.raises(RequestError, match="looked up") as refused:
                client.infer("linear", {"x": X})
            assert refused.value.status == 503
        finally:
            source.is_up.set()
            service = starting.result(60)
        assert client.ready()
        service.stop()


def test_disk_that_stands_still_holds_up_no_inference(maker: PackageMaker, packages: Path) -> None:
    write(maker, packages, "1.0.0")
    source = SlowDisk([packages], maker.trust)
    with (
        running(make_config(packages.parent, models={"linear": ON_THREADS}), source) as service,
        service.connect() as client,
    ):
        source.is_up.clear()
        client.sendall(post_bytes("/v2/repository/index", b""))
        for _ in range(5):
            assert infer(service).binary == Y
        source.is_up.set()
        assert Replies(client).next().json[0]["state"] == "READY"


def test_folder_that_vanishes_is_said_and_what_is_loaded_serves_on(
    maker: PackageMaker, packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages) as service:
        shutil.rmtree(packages)
        assert index(service) == [("linear", "1.0.0", "READY", "")]
        assert "No such file" in caplog.text
        assert load(service).status == 400
        assert infer(service).binary == Y
        assert ask(service, get_bytes("/v2/health/ready")).status == 200
        packages.mkdir()
        write(maker, packages, "2.0.0")
        assert load(service).status == 200
        assert served_version(service) == "2.0.0"


def test_state_folder_that_vanishes_leaves_what_is_loaded_serving(
    maker: PackageMaker, packages: Path
) -> None:
    slots = Slots(packages.parent / "state", maker.trust)
    slots.install(write(maker, packages, "1.0.0"))
    with running(make_config(packages.parent), InstalledModels(slots)) as service:
        shutil.rmtree(slots.folder)
        assert [line[:3] for line in index(service)] == [("linear", "1.0.0", "READY")]
        assert load(service).status >= 400
        assert infer(service).binary == Y
        slots.install(write(maker, packages, "2.0.0"))
        assert load(service).status == 200
        assert served_version(service) == "2.0.0"


def test_clients_that_fight_over_one_model_leave_it_whole(
    maker: PackageMaker, packages: Path, is_long: bool
) -> None:
    slots = Slots(packages.parent / "state", maker.trust)
    for version in ("1.0.0", "2.0.0"):
        slots.install(write(maker, packages, version))
        slots.confirm("linear", version)
    with running(make_config(packages.parent), InstalledModels(slots)) as service:
        wrong: list[Any] = []

        def fight(number: int) -> None:
            rng = np.random.default_rng(number)
            for _ in range(400 if is_long else 40):
                what = ("load", "unload", "rollback", "install", "infer")[rng.integers(5)]
                if what == "infer":
                    reply = infer(service)
                    if reply.status == 200 and reply.binary != Y:
                        wrong.append(reply.binary)
                elif what == "rollback":
                    with contextlib.suppress(SlotError):
                        slots.rollback("linear")
                elif what == "install":
                    version = f"{rng.integers(1, 3)}.0.0"
                    with contextlib.suppress(SlotError):
                        slots.install(packages / f"linear-{version}.edgepkg", RETRY)
                else:
                    reply = ask(service, post_bytes(f"/v2/repository/models/linear/{what}", b""))
                if what not in ("rollback", "install") and reply.status not in (200, 404, 503):
                    wrong.append((what, reply.status, reply.body))

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(fight, range(8)))
        assert wrong == []
        assert load(service).status == 200
        assert infer(service).binary == Y
        assert service.call(lambda: len(service.service.registry.models.served())) == 1
        wait_for(lambda: service.call(lambda: not service.service.registry._lifecycle.leaving))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_installation_on_a_full_disk_leaves_what_serves(maker: PackageMaker, packages: Path) -> None:
    state = packages.parent / "state"
    state.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(state)], check=False)
    if mounted.returncode:
        pytest.skip("no disk may be mounted here")
    try:
        slots = Slots(state / "edgekit", maker.trust)
        slots.install(write(maker, packages, "1.0.0"))
        with running(make_config(packages.parent), InstalledModels(slots)) as service:
            free = os.statvfs(state)
            (state / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize))
            with pytest.raises(SlotError, match="No space left"):
                slots.install(write(maker, packages, "2.0.0"))
            assert load(service).status == 200
            assert served_version(service) == "1.0.0"
            (state / "filler").unlink()
            slots.install(packages / "linear-2.0.0.edgepkg")
            assert load(service).status == 200
            assert served_version(service) == "2.0.0"
    finally:
        subprocess.run(["umount", str(state)], check=True)
