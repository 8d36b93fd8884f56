"""Services with isolated models, a model that takes long and answers much, and clients that keep asking."""

import contextlib
import hashlib
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import (
    Array,
    Background,
    Replies,
    Reply,
    Running,
    X,
    Y,
    infer_bytes,
    make_config,
    running,
)
from tests.waiting import wait_for

from edgekit_runtime.package import figures
from edgekit_runtime.package.archive import write_package
from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.package.manifest_entries import Artifact, BackendChoice
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.model import Isolation, ModelOptions
from edgekit_runtime.service.workers.isolated_model import IsolatedModel
from edgekit_runtime.tensors import TensorSpec

OTHER = "/v2/models/other/infer"
SLOW = "/v2/models/slow/infer"
_WIDTH = 256
_TIMES = 64


def write_slow(maker: PackageMaker, path: Path) -> None:
    """Write `slow`: y[N, 256] = x[N, 256] times the identity, 64 times; 4096 rows take about a second."""
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    names = ["x", *(f"t{number}" for number in range(_TIMES - 1)), "y"]
    graph = helper.make_graph(
        [helper.make_node("MatMul", [a, "w"], [b]) for a, b in itertools.pairwise(names)],
        "slow",
        [helper.make_tensor_value_info("x", float32, ["N", _WIDTH])],
        [helper.make_tensor_value_info("y", float32, ["N", _WIDTH])],
        [onnx.numpy_helper.from_array(np.eye(_WIDTH, dtype=np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    golden = np.ones((1, _WIDTH), np.float32).tobytes()
    contents = {"golden/x.bin": golden, "golden/y.bin": golden, "model.onnx": model.SerializeToString()}
    artifacts = tuple(
        Artifact(name, len(data), hashlib.sha256(data).hexdigest(), "golden" if "golden" in name else "model")
        for name, data in sorted(contents.items())
    )
    manifest = Manifest(
        name="slow",
        version="1.0.0",
        target="x86-64",
        inputs=(TensorSpec("x", "float32", ("N", _WIDTH)),),
        outputs=(TensorSpec("y", "float32", ("N", _WIDTH)),),
        artifacts=artifacts,
        backend=BackendChoice("ort", "model.onnx", {"threads": 1}),
        golden=Golden(
            (GoldenInput("x", "float32", (1, _WIDTH), "golden/x.bin"),),
            (
                GoldenOutput(
                    name="y", dtype="float32", shape=(1, _WIDTH), path="golden/y.bin", atol=0.0, rtol=0.0
                ),
            ),
        ),
        # What is assumed without it would not allow 20,000 rows.
        figures={"memory_estimate": {figures.RUN_MEMORY_FIGURE: 4.0}},
    )
    write_package(path, manifest, contents, maker.signer)


def slow_input(rows: int) -> Array:
    return np.ones((rows, _WIDTH), np.float32)


@contextlib.contextmanager
def running_isolated(
    maker: PackageMaker, folder: Path, *, slow: bool = False, config: Any = None, **isolation: Any
) -> Iterator[Running]:
    """Serve `linear`, isolated, and `other`, the same model in the service itself; maybe `slow` too."""
    packages = folder / "packages"
    packages.mkdir()
    maker.write(packages / "linear.edgepkg")
    maker.write(packages / "other.edgepkg", name="other")
    options = ModelOptions(isolated=True, isolation=Isolation(**isolation))
    models = {"linear": options}
    if slow:
        write_slow(maker, packages / "slow.edgepkg")
        models["slow"] = options
    made = make_config(folder, models=models, **(config or {}))
    with running(made, PackageFiles([packages], maker.trust)) as service:
        yield service


def find_model(service: Running, name: str = "linear") -> IsolatedModel:
    def find() -> IsolatedModel:
        (model,) = (one for one in service.service.workers.models if one.manifest.name == name)
        return model

    model: IsolatedModel = service.call(find)
    return model


def find_pids(service: Running, name: str = "linear") -> tuple[int, ...]:
    """Return the process ids of the workers of a model, those first that have loaded it."""
    model = find_model(service, name)

    def find() -> tuple[int, ...]:
        starting = [worker for worker in model.workers if worker not in model.ready]
        return tuple(worker.pid for worker in (*model.ready, *starting))

    pids: tuple[int, ...] = service.call(find)
    return pids


def wait_backed(service: Running) -> None:
    """Wait until a worker of `linear` stands by that has loaded the model."""
    model = find_model(service)
    wait_for(lambda: service.call(lambda: len(model.ready)) == 2, "the worker that stands by")


def kill(service: Running, number: int, name: str = "linear") -> int:
    """Send a signal to the active worker of a model; returns its process id."""
    pid = find_pids(service, name)[0]
    os.kill(pid, number)
    return pid


def ask_again(service: Running, request: bytes) -> Reply:
    """Ask until the answer is 200, as a client does that heeds 503."""

    def ask() -> Reply | None:
        with contextlib.suppress(ConnectionError), service.connect() as client:
            client.sendall(request)
            reply = Replies(client).next()
            assert reply.status in (200, 503), reply
            return reply if reply.status == 200 else None
        return None

    reply: Reply = wait_for(ask, "an answer of the model")
    return reply


class Asker(Background):
    """A client on a thread that asks on one connection, again and again, and makes a new one where it ends.

    It rests between answers: without, it takes a processor from the workers whose start a test waits for.

    Attributes:
        statuses: of all answers.
        ends: how often its connection ended before an answer.
        wrong: answers of status 200 that were not right.
    """

    def __init__(self, connect: Callable[[], socket.socket], request: bytes, binary: bytes) -> None:
        self._connect, self._request, self._binary = connect, request, binary
        self.statuses: dict[int, int] = {}
        self.ends = self.wrong = 0
        super().__init__()

    def work(self) -> None:
        while not self.is_over.is_set():
            try:
                with self._connect() as client:
                    self._ask(client)
            except ConnectionError:  # noqa: PERF203  # each connection is a try of its own
                self.ends += 1

    def _ask(self, client: socket.socket) -> None:
        replies = Replies(client)
        while not self.is_over.is_set():
            client.sendall(self._request)
            reply = replies.next()
            self.statuses[reply.status] = self.statuses.get(reply.status, 0) + 1
            if reply.status == 200:
                self.wrong += reply.binary != self._binary
            self.is_over.wait(0.003 if reply.status == 200 else 0.01)
            if reply.fields.get("connection") == "close":
                return


def asking(service: Running, path: str, *, tcp: bool = False) -> Asker:
    return Asker(service.connect_tcp if tcp else service.connect, infer_bytes(X, path=path), Y)
