"""A small gRPC client in frames, for what no ordinary client sends; it reads what the service answers."""

import contextlib
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import Array, Running, make_config, running

from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.source import Source
from edgekit_runtime.service.options.http import GrpcOptions

hpack: Any = pytest.importorskip("hpack")

from edgekit_runtime.service.grpc.messages import read_message, write_message  # noqa: E402

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM, ACK, END_HEADERS, PADDED = 0x1, 0x1, 0x4, 0x8
INITIAL_WINDOW_SIZE = 0x4
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0x1, 0x3, 0x5, 0x6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 0x7, 0x8, 0x9, 0xB
INFER, STREAM = "ModelInfer", "ModelStreamInfer"


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def setting(name: int, number: int) -> bytes:
    return struct.pack(">HI", name, number)


def word(number: int) -> bytes:
    return struct.pack(">I", number)


def head_fields(method: str = INFER, **more: str) -> list[tuple[str, str]]:
    """Return the fields of a call; `more` adds some, with `_` for `-`."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/inference.GRPCInferenceService/{method}",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return [*fields.items(), *((name.replace("_", "-"), value) for name, value in more.items())]


def wrap(message: bytes, *, is_compressed: bool = False) -> bytes:
    return struct.pack(">BI", is_compressed, len(message)) + message


def infer_message(x: Array | None = None, model: str = "linear", **more: Any) -> bytes:
    """Return a ModelInferRequest with one input x."""
    x = np.array([[1, 2, 3, 4]], np.float32) if x is None else x
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape)}
    values = {"model_name": model, "inputs": [tensor], "raw_input_contents": [x.tobytes()], **more}
    return write_message("ModelInferRequest", values)


@dataclass
class Reply:
    """What has arrived of one response."""

    fields: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    is_over: bool = False
    reset: int | None = None

    @property
    def status(self) -> int:
        return int(self.fields["grpc-status"])

    @property
    def text(self) -> str:
        return self.fields.get("grpc-message", "")

    def messages(self, name: str = "ModelInferResponse") -> list[dict[str, Any]]:
        messages, data = [], self.data
        while data:
            (size,) = struct.unpack_from(">I", data, 1)
            messages.append(read_message(name, data[5 : 5 + size]))
            data = data[5 + size :]
        return messages

    def array(self, index: int = 0) -> Array:
        (message,) = self.messages()
        shape = message["outputs"][index]["shape"]
        return np.frombuffer(message["raw_output_contents"][index], np.float32).reshape(shape)


class GrpcClient:
    """A connection that shows every frame.

    Attributes:
        replies: by stream.
        goaway: error and text of GOAWAY, or None.
        pongs: payloads of the answers to PING.
        credit: WINDOW_UPDATE so far, by stream.
    """

    def __init__(self, connected: socket.socket, *settings: bytes) -> None:
        self._socket = connected
        connected.settimeout(60)
        self.encoder, self._decoder = hpack.Encoder(), hpack.Decoder()
        self._data = b""
        self.replies: dict[int, Reply] = {}
        self.goaway: tuple[int, str] | None = None
        self.pongs: list[bytes] = []
        self.credit: dict[int, int] = {}
        self.acks = self.sent_bytes = 0
        self._next = 1
        if not settings:  # wide windows
            settings = (setting(INITIAL_WINDOW_SIZE, 1 << 24),)
            credit = frame(WINDOW_UPDATE, 0, 0, word(1 << 24))
        else:
            credit = b""
        self.send(PREFACE + frame(SETTINGS, payload=b"".join(settings)) + credit)

    def send(self, *frames: bytes) -> None:
        self._socket.sendall(b"".join(frames))

    def begin(self, method: str = INFER, *, flags: int = END_HEADERS, **more: str) -> int:
        """Begin a call; return its stream."""
        stream = self._next
        self._next += 2
        self.send(frame(HEADERS, flags, stream, self.encoder.encode(head_fields(method, **more))))
        return stream

    def post(self, message: bytes, method: str = INFER, **more: str) -> int:
        """Begin a call of one message; return its stream."""
        stream = self.begin(method, **more)
        body = wrap(message)
        pieces = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
        for piece in pieces[:-1]:
            self.send(frame(DATA, 0, stream, piece))
        self.send(frame(DATA, END_STREAM, stream, pieces[-1]))
        return stream

    def ask(self, message: bytes, method: str = INFER, **more: str) -> Reply:
        return self.wait(self.post(message, method, **more))

    def wait(self, stream: int) -> Reply:
        """Read until the response of a stream has ended."""
        while not (reply := self.reply(stream)).is_over:
            if not self.read():
                raise ConnectionError(f"closed; {self.goaway}")
        return reply

    def wait_for_goaway(self) -> tuple[int, str]:
        while self.goaway is None and self.read():
            pass
        assert self.goaway is not None
        return self.goaway

    def is_closed(self) -> bool:
        with contextlib.suppress(ConnectionResetError):
            while self.read():
                pass
        return True

    def reply(self, stream: int) -> Reply:
        return self.replies.setdefault(stream, Reply())

    def read(self) -> bool:
        """Read a piece; return False at the end."""
        data = self._socket.recv(65_536)
        self._data += data
        while len(self._data) >= 9:
            size = int.from_bytes(self._data[:3], "big")
            if len(self._data) < 9 + size:
                break
            kind, flags, stream = self._data[3], self._data[4], int.from_bytes(self._data[5:9], "big")
            payload, self._data = self._data[9 : 9 + size], self._data[9 + size :]
            self._take(kind, flags, stream, payload)
        return bool(data)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == HEADERS:
            reply = self.reply(stream)
            reply.fields.update(self._decoder.decode(payload))
            reply.is_over |= bool(flags & END_STREAM)
        elif kind == DATA:
            self.reply(stream).data += payload
        elif kind == RST_STREAM:
            self.reply(stream).is_over = True
            self.reply(stream).reset = int.from_bytes(payload, "big")
        elif kind == GOAWAY:
            self.goaway = int.from_bytes(payload[4:8], "big"), payload[8:].decode()
        elif kind == PING:
            self.pongs.append(payload)
        elif kind == WINDOW_UPDATE:
            self.credit[stream] = self.credit.get(stream, 0) + int.from_bytes(payload, "big")
        elif kind == SETTINGS:
            self.acks += flags & ACK


def grpc_config(folder: Path, **sections: Any) -> Any:
    options = {"unix_socket": str(folder / "grpc.sock"), **sections.pop("grpc", {})}
    return make_config(folder, grpc=GrpcOptions(**options), **sections)


@contextlib.contextmanager
def running_grpc(
    maker: PackageMaker, folder: Path, source: Source | None = None, **sections: Any
) -> Iterator[Running]:
    """Serve `linear`, or what is in `source`, also over gRPC at `grpc.sock` in `folder`."""
    if source is None:
        maker.write(folder / "linear.edgepkg")
        source = PackageFiles([folder / "linear.edgepkg"], maker.trust)
    with running(grpc_config(folder, **sections), source) as service:
        yield service


@contextlib.contextmanager
def connecting(path: "str | Path", *settings: bytes) -> Iterator[GrpcClient]:
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(str(path))
        yield GrpcClient(connected, *settings)


def grpc_path(service: Running) -> str:
    return str(Path(service.socket_path).with_name("grpc.sock"))


def grpc_port(service: Running) -> int:
    return int(next(name for name in service.addresses if name.startswith("grpc://")).rsplit(":", 1)[1])


def read_all(parts: Sequence[Any]) -> bytes:
    return b"".join(map(bytes, parts))
