"""Runs a fleet with its manager in a thread of this process, so that the demo can observe it."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgekit_fleet.operations.running import RunningFleet, start
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings

_STOP_S: Final = 10.0


@contextlib.contextmanager
def running_manager(folder: Path, home: Path, names: tuple[str, ...]) -> Iterator[RunningFleet]:
    """Yield a running fleet on free ports of loopback.

    Args:
        folder: The folder of the fleet.
        home: The configuration folder. Packages signed with its keys are trusted.
        names: The addresses under which devices reach the fleet.

    Raises:
        EdgekitError: See `operations.running.start`.
    """
    settings = FleetSettings(names=names, broker_port=_find_free_port(), web_port=_find_free_port())
    before = os.environ.get("EDGEKIT_HOME")
    os.environ["EDGEKIT_HOME"] = str(home)
    try:
        with start(FleetFolder(folder), settings) as fleet, _turn(fleet):
            yield fleet
    finally:
        if before is None:
            del os.environ["EDGEKIT_HOME"]
        else:
            os.environ["EDGEKIT_HOME"] = before


@contextlib.contextmanager
def _turn(fleet: RunningFleet) -> Iterator[None]:
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    has_begun = threading.Event()

    async def run() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        has_begun.set()
        await fleet.loop.run(stop)

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="manager", daemon=True)
    thread.start()
    has_begun.wait()
    try:
        yield
    finally:
        ((loop, stop),) = loops
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            loop.call_soon_threadsafe(stop.set)
        thread.join(_STOP_S)


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
