"""Reads the body of a request, with limits on size and time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import ClientDisconnect, Request

from edgekit_runtime.errors import RequestError

_DISCARD_S: Final = 10.0


async def read_body(request: Request, most_bytes: int, limit_s: float) -> bytes:
    """Return the body, which must arrive within `limit_s` seconds.

    Raises:
        RequestError: 413 if it exceeds `most_bytes`, 408 if it is too slow, or 400 if it is incomplete.
    """

    async def read() -> bytes:
        return b"".join([piece async for piece in read_pieces(request, most_bytes, limit_s)])

    try:
        return await asyncio.wait_for(read(), limit_s)
    except asyncio.TimeoutError as cause:
        raise RequestError(408, "the body came too slowly") from cause


async def read_pieces(request: Request, most_bytes: int, piece_s: float) -> AsyncIterator[bytes]:
    """Yield the chunks of the body, at most `most_bytes` in total.

    Each chunk must arrive within `piece_s` seconds.

    Raises:
        RequestError: See `read_body`.
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
    """Read and discard the rest of a body, for at most 10 s.

    A browser shows no answer while it is still sending the body.
    """

    async def read() -> None:
        async for _ in request.stream():
            pass

    # RuntimeError: all of it was read.
    with contextlib.suppress(asyncio.TimeoutError, ClientDisconnect, RuntimeError):
        await asyncio.wait_for(read(), _DISCARD_S)
