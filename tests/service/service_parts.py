"""A real service on a thread, with real sockets, and packages for it."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from tests.runtime.conftest import WEIGHT, PackageMaker

from edgekit_runtime.package.archive import write_package
from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.package.manifest_entries import Artifact, BackendChoice, TaskChoice
from edgekit_runtime.package.states import RecurrentState
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.source import Source
from edgekit_runtime.service.options.config import Listen, ServiceConfig
from edgekit_runtime.service.server import Service
from edgekit_runtime.tensors import TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]

X = np.array([[1, 2, 3, 4]], np.float32)
Y = (X @ WEIGHT).tobytes()
"""What `linear` answers to X, as bytes."""


class Running:
    """A service that runs on a thread of its own.

    Attributes:
        service: it; touch it with `do` only.
        socket_path: of its Unix socket.
        port: of TCP.
        addresses: all that it listens on.
    """

    def __init__(self, config: ServiceConfig, source: Source, *, tries_in_child: bool = False) -> None:
        self._tries_in_child = tries_in_child
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        try:
            self.service = self.do(self._start(config, source))
        except BaseException:
            self.halt()
            raise
        self.socket_path = config.listen.unix_socket
        self.port = int(self.addresses[-1].rsplit(":", 1)[1]) if config.listen.host else 0

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _start(self, config: ServiceConfig, source: Source) -> Service:
        service = Service(config, source, tries_in_child=self._tries_in_child)
        try:
            self.addresses = await service.listen()
        except BaseException:
            await service.stop()
            raise
        await service.registry.load_all()
        return service

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def call(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return self.do(run())

    def stop(self) -> None:
        self.do(self.service.stop())
        self.halt()

    def halt(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(60)
        client.connect(self.socket_path)
        return client

    def connect_tcp(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 60)


@contextlib.contextmanager
def running(config: ServiceConfig, source: Source, *, tries_in_child: bool = False) -> Iterator[Running]:
    service = Running(config, source, tries_in_child=tries_in_child)
    try:
        yield service
    finally:
        service.stop()


def make_config(folder: Path, **sections: Any) -> ServiceConfig:
    listen = sections.pop("listen", {})
    stated = Listen(**{"unix_socket": str(folder / "s.sock"), "port": 0, **listen})
    return ServiceConfig(listen=stated, **sections)


@contextlib.contextmanager
def running_linear(maker: PackageMaker, folder: Path, **sections: Any) -> Iterator[Running]:
    """Serve `linear`: y[N, 2] = x[N, 4] @ WEIGHT."""
    path = folder / "linear.edgepkg"
    maker.write(path)
    with running(make_config(folder, **sections), PackageFiles([path], maker.trust)) as service:
        yield service


def write_identity(maker: PackageMaker, path: Path, dtypes: Sequence[str], *, version: str = "1.0.0") -> None:
    """Write `echo`, which returns inputs in_DTYPE[N, 3] as out_DTYPE."""
    write_model(
        maker,
        path,
        Manifest_(
            "echo",
            version,
            {f"in_{dtype}": f"out_{dtype}" for dtype in dtypes},
            {f"in_{dtype}": np.ones((2, 3), dtype) for dtype in dtypes},
        ),
    )


@dataclasses.dataclass
class Manifest_:  # noqa: N801  # a sketch of one
    name: str
    version: str
    names: Mapping[str, str]
    golden: Mapping[str, Array]


def write_model(maker: PackageMaker, path: Path, sketch: Manifest_) -> None:
    helper = onnx.helper
    ins, outs, nodes = [], [], []
    for name, out in sketch.names.items():
        kind = helper.np_dtype_to_tensor_dtype(sketch.golden[name].dtype)
        ins.append(helper.make_tensor_value_info(name, kind, ["N", 3]))
        outs.append(helper.make_tensor_value_info(out, kind, ["N", 3]))
        nodes.append(helper.make_node("Identity", [name], [out]))
    graph = helper.make_graph(nodes, "identity", ins, outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    expected = {sketch.names[name]: array for name, array in sketch.golden.items()}
    write_signed(maker, path, sketch, expected, model.SerializeToString())


def write_signed(
    maker: PackageMaker,
    path: Path,
    sketch: Manifest_,
    expected: Mapping[str, Array],
    model: bytes,
    figures: Mapping[str, Any] | None = None,
    *,
    attachments: Mapping[str, bytes] | None = None,
    task: TaskChoice | None = None,
    states: Sequence[RecurrentState] = (),
) -> None:
    """Write the package of a model whose first dimensions are all free.

    Args:
        maker: signs it.
        path: of the package.
        sketch: its name, version and golden inputs.
        expected: golden outputs.
        model: content of the ONNX file.
        figures: of the manifest.
        attachments: role (`labels` or `preprocessing`) -> content.
        task: of the manifest.
        states: of the manifest.
    """
    contents, roles = {"model.onnx": model}, {"model.onnx": "model"}
    for role, content in (attachments or {}).items():
        contents[role], roles[role] = content, role
    for name, array in (*sketch.golden.items(), *expected.items()):
        contents[f"golden/{name}.bin"] = array.tobytes()
        roles[f"golden/{name}.bin"] = "golden"
    golden_in = [
        GoldenInput(name, array.dtype.name, array.shape, f"golden/{name}.bin")
        for name, array in sketch.golden.items()
    ]
    golden_out = [
        GoldenOutput(
            name=name,
            dtype=array.dtype.name,
            shape=array.shape,
            path=f"golden/{name}.bin",
            atol=0.0,
            rtol=0.0,
        )
        for name, array in expected.items()
    ]
    artifacts = tuple(
        Artifact(name, len(data), hashlib.sha256(data).hexdigest(), roles[name])
        for name, data in sorted(contents.items())
    )

    def describe(tensors: Mapping[str, Array]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name, array.dtype.name, ("N", *array.shape[1:])) for name, array in tensors.items()
        )

    manifest = Manifest(
        name=sketch.name,
        version=sketch.version,
        target="x86-64",
        inputs=describe(sketch.golden),
        outputs=describe(expected),
        artifacts=artifacts,
        backend=BackendChoice("ort", "model.onnx", {"threads": 1}),
        golden=Golden(tuple(golden_in), tuple(golden_out)),
        figures=figures or {},
        task=task,
        **{role: role for role in attachments or {}},
        states=tuple(states),
    )
    write_package(path, manifest, contents, maker.signer)


Beside = TypeVar("Beside", bound="Background")


class Background:
    """Does `work` on a thread beside a block; `is_over` tells it that the block has ended."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self.work)

    def __enter__(self: Beside) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def work(self) -> None:
        raise NotImplementedError


# Raw HTTP


def infer_bytes(x: Array, *, path: str = "/v2/models/linear/infer", fields: str = "", **more: Any) -> bytes:
    """Return a binary inference request to `linear` with one input x."""
    entry = {
        "name": "x",
        "datatype": "FP32",
        "shape": list(x.shape),
        "parameters": {"binary_data_size": x.nbytes},
    }
    text = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}, **more}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: l\r\n{fields}Inference-Header-Content-Length: {len(text)}\r\n"
        f"Content-Length: {len(text) + x.nbytes}\r\n\r\n"
    )
    return head.encode() + text + x.tobytes()


def post_bytes(path: str, body: bytes, fields: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: l\r\n{fields}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def get_bytes(path: str, method: str = "GET", fields: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: l\r\n{fields}\r\n".encode()


@dataclasses.dataclass
class Reply:
    status: int
    fields: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        length = self.fields.get("inference-header-content-length")
        return json.loads(self.body if length is None else self.body[: int(length)])

    @property
    def binary(self) -> bytes:
        return self.body[int(self.fields["inference-header-content-length"]) :]


class Replies:
    """Reads answers from a connection, one by one."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._data = b""

    def next(self, *, has_body: bool = True) -> Reply:
        while b"\r\n\r\n" not in self._data:
            self._more()
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        fields = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        size = int(fields.get("content-length", 0)) if has_body else 0
        while len(self._data) < size:
            self._more()
        body, self._data = self._data[:size], self._data[size:]
        return Reply(int(first.split(" ")[1]), fields, body)

    def is_closed(self) -> bool:
        try:
            return not self._data and self._client.recv(1) == b""
        except ConnectionResetError:
            return True

    def _more(self) -> None:
        data = self._client.recv(65536)
        if not data:
            raise ConnectionError(f"closed after {self._data!r}")
        self._data += data


def ask(service: Running, request: bytes) -> Reply:
    """Send one request on a connection of its own."""
    with service.connect() as client:
        client.sendall(request)
        return Replies(client).next()
