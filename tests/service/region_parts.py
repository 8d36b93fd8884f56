"""Shared memory as a client makes and registers it, over raw HTTP."""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

from tests.service.service_parts import Replies, Reply, post_bytes

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
REGION = "/v2/systemsharedmemory/region"


@contextlib.contextmanager
def memfd(size: int, seals: int = SEALS, flags: int = 0) -> Iterator[int]:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(descriptor, size)
        if seals:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def register_bytes(name: str, **stated: Any) -> tuple[bytes, bytes]:
    """Return the head of a request, whose answer is awaited, and its body, with which the descriptors go."""
    body = json.dumps({"key": "k", "offset": 0, **stated}).encode()
    fields = f"Expect: 100-continue\r\nEdgekit-Descriptor: 1\r\nContent-Length: {len(body)}\r\n"
    return f"POST {REGION}/{name}/register HTTP/1.1\r\nHost: l\r\n{fields}\r\n".encode(), body


def register(client: socket.socket, name: str, descriptors: list[int], **stated: Any) -> Reply:
    head, body = register_bytes(name, **stated)
    client.sendall(head)
    begun = client.recv(1000)
    assert begun == b"HTTP/1.1 100 Continue\r\n\r\n"
    socket.send_fds(client, [body], descriptors)
    return Replies(client).next()


def infer_in(region: str, *, offset: int = 0, size: int = 16, out: int | None = None) -> bytes:
    place = {"shared_memory_region": region, "shared_memory_offset": offset, "shared_memory_byte_size": size}
    request: dict[str, Any] = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": place}]
    }
    if out is not None:
        place = {**place, "shared_memory_offset": out, "shared_memory_byte_size": 8}
        request["outputs"] = [{"name": "y", "parameters": place}]
    return post_bytes("/v2/models/linear/infer", json.dumps(request).encode())
