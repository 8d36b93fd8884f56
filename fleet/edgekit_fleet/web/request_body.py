"""Reads the body of a request, bounded in size and time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import ClientDisconnect, Request

from edgekit_runtime.errors import RequestError

_DISCARD_S: Final = 10.0


async def read_body(request: Request, most_bytes: int, limit_s: float) -> bytes:
    """Return the body.

    `limit_s`: time limit for the whole body.

    Raises:
        RequestError: 413 it has over `most_bytes`, 408 it comes too slowly, 400 it is cut off.
    """

    async def read() -> bytes:
        return b"".join([piece async for piece in read_pieces(request, most_bytes, limit_s)])

    try:
        return await asyncio.wait_for(read(), limit_s)
    except asyncio.TimeoutError as cause:
        raise RequestError(408, "the body came too slowly") from cause


async def read_pieces(request: Request, most_bytes: int, piece_s: float) -> AsyncIterator[bytes]:
    """Yield the pieces of the body as they come, at most `most_bytes` in all.

    `piece_s`: time limit for each piece.

    Raises:
        RequestError: as from `read_body`.
    """
    stated = request.headers.get("content-length", "0")
    size_bytes = int(stated) if stated.isdecimal() and len(stated) < 20 else 0
    if size_bytes > most_bytes:
        raise RequestError(413, f"the body has over {most_bytes} bytes")
    size_bytes, pieces = 0, request.stream().__aiter__()
    while True:
        try:
            piece = await asyncio.wait_for(pieces.__anext__(), piece_s)
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError as cause:
            raise RequestError(408, "the body came too slowly") from cause
        except ClientDisconnect as cause:
            raise RequestError(400, "the body was cut off") from cause
        size_bytes += len(piece)
        if size_bytes > most_bytes:
            raise RequestError(413, f"the body has over {most_bytes} bytes")
        yield piece


async def discard_body(request: Request) -> None:
    """Read and drop the rest of a body, for 10 s at most: a browser shows no answer while it still sends."""

    async def read() -> None:
        async for _ in request.stream():
            pass

    # RuntimeError: all of it was read.
    with contextlib.suppress(asyncio.TimeoutError, ClientDisconnect, RuntimeError):
        await asyncio.wait_for(read(), _DISCARD_S)
