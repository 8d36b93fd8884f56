"""Reads the body of a request, bounded in size and time."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from edgekit_runtime.errors import RequestError


async def read_body(request: Request, most_bytes: int, limit_s: float) -> bytes:
    """Return the body.

    Args:
        request: of HTTP.
        most_bytes: that it may have.
        limit_s: until it must be here.

    Raises:
        RequestError: 413 it is too large, 408 it comes too slowly, 400 it is cut off.
    """
    parts: list[bytes] = []
    size_bytes = 0

    async def read() -> None:
        nonlocal size_bytes
        async for part in request.stream():
            size_bytes += len(part)
            if size_bytes > most_bytes:
                raise RequestError(413, f"the body has over {most_bytes} bytes")
            parts.append(part)

    try:
        await asyncio.wait_for(read(), limit_s)
    except asyncio.TimeoutError as cause:
        raise RequestError(408, "the body came too slowly") from cause
    except ClientDisconnect as cause:
        raise RequestError(400, "the body was cut off") from cause
    return b"".join(parts)
