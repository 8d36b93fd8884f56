import asyncio
import contextlib
import gc
import gzip
import struct
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.service_parts import Replies, Reply, Running, X, Y, ask, infer_bytes, running_linear

from edgekit_runtime.codecs.compression import compress
from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.api.compressed_bodies import CompressedBodies
from edgekit_runtime.service.http.request_head import HeadCache, RequestHead
from edgekit_runtime.service.options.http import HttpLimits

zstandard = pytest.importorskip("zstandard")

LONG = np.arange(100_000, dtype=np.float32).reshape(-1, 4) % 251
LONG_ANSWER = (LONG @ WEIGHT).tobytes()


def without_size(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=False).compress(data)


def compressed(request: bytes, coding: str, write: Callable[[bytes], bytes]) -> bytes:
    """Return the request with its body compressed; its header length is that of the decoded body."""
    head, _, body = request.partition(b"\r\n\r\n")
    kept = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    body = write(body)
    return b"\r\n".join(
        [*kept, f"Content-Encoding: {coding}".encode(), f"Content-Length: {len(body)}".encode(), b"", body]
    )


CODINGS = [
    ("zstd", compress),
    ("ZSTD", without_size),
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
]
OTHER_FORMS = [
    ("x-gzip", gzip.compress),
    ("gzip", lambda body: gzip.compress(body[:99]) + gzip.compress(body[99:])),
    ("zstd", lambda body: compress(body[:99]) + compress(body[99:])),
    ("", bytes),
    (" , Identity", bytes),
    ("identity,\tX-GZip ,", gzip.compress),
    ("\r\nContent-Encoding: gzip", gzip.compress),
]


@pytest.mark.parametrize(("coding", "write"), CODINGS + OTHER_FORMS)
@pytest.mark.parametrize(("given", "answer"), [(X, Y), (LONG, LONG_ANSWER)])
def test_compressed_request_is_answered_like_a_plain_one(
    coding: str,
    write: Callable[[bytes], bytes],
    given: np.ndarray,
    answer: bytes,
    linear: Running,
) -> None:
    request = compressed(infer_bytes(given), coding, write)
    with linear.connect() as client:
        replies = Replies(client)
        for _ in range(3):  # the connection goes on, also on the way of repeated heads
            client.sendall(request)
            assert replies.next().binary == answer
        client.sendall(infer_bytes(X))
        assert replies.next().binary == Y


@pytest.fixture(scope="module")
def bounded(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service that takes bodies of 4 MiB."""
    folder = tmp_path_factory.mktemp("b")
    with running_linear(maker, folder, http=HttpLimits(max_body_bytes=4 << 20)) as service:
        yield service


def refusal(service: Running, request: bytes) -> Reply:
    with service.connect() as client:
        replies = Replies(client)
        client.sendall(request)
        reply = replies.next()
    assert ask(service, infer_bytes(X)).binary == Y
    return reply


@pytest.mark.parametrize(("coding", "write"), CODINGS)
def test_bomb_is_answered_with_413(coding: str, write: Callable[[bytes], bytes], bounded: Running) -> None:
    head = b"POST /v2/models/linear/infer HTTP/1.1\r\nHost: l\r\n\r\n"
    request = compressed(head + bytes(16 << 20), coding, write)
    assert refusal(bounded, request).status == 413


@pytest.mark.parametrize("given", [X, LONG])
@pytest.mark.parametrize("damage", ["cut", "trailing", "foreign", "lying"])
def test_damaged_frame_is_answered_with_400(damage: str, given: np.ndarray, bounded: Running) -> None:
    def write(body: bytes) -> bytes:
        frame = bytearray(compress(body))
        if damage == "cut":
            return bytes(frame[:-3])
        if damage == "trailing":
            return bytes(frame) + b"GET / HTTP/1.1"
        if damage == "foreign":
            return body
        at = 5 if frame[4] & 0x20 else 6
        width, offset = {0: ("<B", 0), 1: ("<H", 256), 2: ("<I", 0)}[frame[4] >> 6]
        size = struct.unpack_from(width, frame, at)[0]
        assert size + offset == len(body)
        struct.pack_into(width, frame, at, size + 1)
        return bytes(frame)

    assert refusal(bounded, compressed(infer_bytes(given), "zstd", write)).status == 400


def test_unknown_coding_is_answered_with_415_and_what_is_known(bounded: Running) -> None:
    reply = refusal(bounded, compressed(infer_bytes(X), "br", bytes))
    assert reply.status == 415
    assert reply.fields["accept-encoding"] == "zstd, gzip, deflate"


def test_codings_on_top_of_each_other_are_unsupported(bounded: Running) -> None:
    reply = refusal(bounded, compressed(infer_bytes(X), "gzip, zstd", bytes))
    assert reply.status == 415
    assert "'gzip, zstd'" in reply.json["error"]


def test_request_without_a_body_may_state_a_coding(bounded: Running) -> None:
    request = b"GET /v2/models/linear/ready HTTP/1.1\r\nHost: l\r\nContent-Encoding: gzip\r\n\r\n"
    assert refusal(bounded, request).status == 200


@pytest.mark.parametrize(("coding", "write"), CODINGS)
@pytest.mark.parametrize(("given", "answer"), [(X, Y), (LONG, LONG_ANSWER)])
def test_bodies_of_many_clients_at_once_are_all_answered(
    coding: str,
    write: Callable[[bytes], bytes],
    given: np.ndarray,
    answer: bytes,
    linear: Running,
) -> None:
    request = compressed(infer_bytes(given), coding, write)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(linear.connect()) for _ in range(32)]
        for client in clients:
            client.sendall(request)
        assert [Replies(client).next().binary == answer for client in clients] == [True] * 32


class Client:
    """What decompression needs of a connection."""

    def __init__(self, address: str = "192.0.2.1") -> None:
        self.is_open = True
        self.client = address
        self.status = 200
        self.contents: list[bytes] = []
        self.done = asyncio.Event()

    def act(self, _head: RequestHead, content: memoryview) -> None:
        self.contents.append(bytes(content))
        self.done.set()

    def respond_error(self, error: RequestError) -> None:
        self.status = error.status
        self.done.set()


def test_bodies_wait_up_to_the_limit_of_bodies_that_are_received() -> None:
    content = np.random.default_rng(3).bytes(1 << 20)
    head = HeadCache().parse(b"POST / HTTP/1.1\r\nHost: l\r\nContent-Encoding: gzip\r\n\r\n")
    limits = HttpLimits(max_body_bytes=2 << 20, max_receiving_bytes=7 << 19)
    clients = [Client() for _ in range(6)]

    async def send() -> None:
        bodies = CompressedBodies(asyncio.get_running_loop(), limits)
        decode: Callable[..., None] = bodies.decode(Client.act)  # type: ignore[arg-type]
        for client in clients[:3]:
            decode(client, head, memoryview(gzip.compress(content)))
        for client in clients[3:]:
            with pytest.raises(RequestError) as caught:
                decode(client, head, memoryview(gzip.compress(content)))
            assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
        clients[1].is_open = False
        await asyncio.wait_for(clients[2].done.wait(), 60)
        decode(clients[5], head, memoryview(gzip.compress(content)))
        await asyncio.wait_for(clients[5].done.wait(), 60)
        assert bodies.close(60)

    asyncio.run(send())
    assert [client.contents == [content] for client in clients] == [True, False, True, False, False, True]


@pytest.mark.parametrize(("coding", "write"), CODINGS[1:])
def test_bombs_of_many_clients_take_the_memory_of_one(coding: str, write: Callable[[bytes], bytes]) -> None:
    fields = f"POST / HTTP/1.1\r\nHost: l\r\nContent-Encoding: {coding}\r\n\r\n"
    head = HeadCache().parse(fields.encode())
    limits = HttpLimits(max_body_bytes=8 << 20)
    bomb = memoryview(write(bytes(9 << 20)))
    clients = [Client() for _ in range(8)]

    async def send() -> None:
        bodies = CompressedBodies(asyncio.get_running_loop(), limits)
        decode: Callable[..., None] = bodies.decode(Client.act)  # type: ignore[arg-type]
        for client in clients:
            decode(client, head, bomb)
        for client in clients:
            await asyncio.wait_for(client.done.wait(), 60)
        assert bodies.close(60)

    gc.disable()
    tracemalloc.start()
    try:
        asyncio.run(send())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert [client.status for client in clients] == [413] * 8
    assert peak_bytes < 3 * limits.max_body_bytes


def test_bodies_that_were_sent_ahead_are_answered_in_order(linear: Running) -> None:
    with linear.connect() as client:
        pairs = [(LONG, LONG_ANSWER), (X, Y), (LONG, LONG_ANSWER), (LONG, LONG_ANSWER), (X, Y)]
        for given, _ in pairs:
            client.sendall(compressed(infer_bytes(given), "gzip", gzip.compress))
        replies = Replies(client)
        assert [replies.next().binary == answer for _, answer in pairs] == [True] * 5


def test_client_that_leaves_while_its_body_is_decompressed_harms_nobody(linear: Running) -> None:
    request = compressed(infer_bytes(LONG), "zstd", compress)
    for _ in range(10):
        with linear.connect() as client:
            client.sendall(request)
    assert ask(linear, infer_bytes(X)).binary == Y


class Recorder:
    """Stands for a reader of zlib or zstandard, and notes the thread and the size of all it expands."""

    def __init__(self, calls: list[tuple[int, int]], reader: Any) -> None:
        self._calls, self._reader = calls, reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def decompress(self, *arguments: Any, **options: Any) -> bytes:
        content = b""
        try:
            content = self._reader.decompress(*arguments, **options)
        finally:
            self._calls.append((threading.get_ident(), len(content)))
        return content

    def decompressobj(self, **options: Any) -> "Recorder":
        return Recorder(self._calls, self._reader.decompressobj(**options))


def lying(frame: bytes) -> bytes:
    """Return the frame with a content size of 1000 bytes stated."""
    assert frame[4] >> 5 == 0b100  # four bytes of size, behind the window
    return frame[:6] + struct.pack("<I", 1000) + frame[10:]


ZEROS = bytes(30 << 20)
HOSTILE: list[tuple[str, Callable[[], bytes]]] = [
    ("zstd", lambda: compress(b"short") + compress(ZEROS)),
    ("zstd", lambda: lying(compress(ZEROS))),
    ("zstd", lambda: compress(b"a") * 4096),
    ("zstd", lambda: struct.pack("<II", 0x184D2A50, 8) + bytes(8) + compress(ZEROS)),
    ("gzip", lambda: gzip.compress(b"") * 1600),
    ("gzip", lambda: gzip.compress(b"short") + gzip.compress(ZEROS)),
    ("gzip", lambda: gzip.compress(ZEROS)),
    ("deflate", lambda: zlib.compress(ZEROS)),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_short_hostile_body_expands_on_the_thread(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    coding, make_body = HOSTILE[number]
    head = HeadCache().parse(f"POST / HTTP/1.1\r\nHost: l\r\nContent-Encoding: {coding}\r\n\r\n".encode())
    calls: list[tuple[int, int]] = []
    for module, name in ((zlib, "decompressobj"), (zstandard, "ZstdDecompressor")):
        make = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, make=make, **options: Recorder(calls, make(*given, **options))
        )
    client = Client()

    async def send() -> None:
        bodies = CompressedBodies(asyncio.get_running_loop(), HttpLimits(max_body_bytes=16 << 20))
        decode: Callable[..., None] = bodies.decode(Client.act)  # type: ignore[arg-type]
        decode(client, head, memoryview(make_body()))
        await asyncio.wait_for(client.done.wait(), 60)
        assert bodies.close(60)

    asyncio.run(send())
    sizes = [size for thread, size in calls if thread == threading.get_ident()]
    assert len(sizes) <= 1
    assert sum(sizes) <= 128 << 10
    assert len(calls) > len(sizes)


def test_clients_whose_bodies_wait_take_turns() -> None:
    content = np.random.default_rng(3).bytes(40 << 10)
    head = HeadCache().parse(b"POST / HTTP/1.1\r\nHost: l\r\nContent-Encoding: gzip\r\n\r\n")
    order: list[str] = []

    def act(client: Client, _head: RequestHead, _content: memoryview) -> None:
        order.append(client.client)
        client.done.set()

    async def send() -> None:
        bodies = CompressedBodies(asyncio.get_running_loop(), HttpLimits())
        decode: Callable[..., None] = bodies.decode(act)  # type: ignore[arg-type]
        body = memoryview(gzip.compress(content))
        clients = [Client("many") for _ in range(65)]  # one under way, and as many as may wait
        for client in clients:
            decode(client, head, body)
        with pytest.raises(RequestError) as caught:
            decode(Client("many"), head, body)
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
        clients += [Client("few"), Client("few"), Client("other")]
        for client in clients[-3:]:
            decode(client, head, body)
        for client in clients:
            await asyncio.wait_for(client.done.wait(), 60)
        assert bodies.close(60)

    asyncio.run(send())
    assert order == ["many", "many", "few", "other", "many", "few"] + ["many"] * 62
