"""What systemd is told of the service: that it starts, that it is ready, that it is alive, that it stops.

Source: sd_notify(3), sd_watchdog_enabled(3).
"""

import asyncio
import contextlib
import os
import socket
from typing import Final

_MICROSECONDS: Final = 1e6
_START_MORE_S: Final = 60.0  # that systemd waits for the next word


class Notifier:
    """Tells systemd; does nothing where there is none."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read from the environment where to tell what, and take it out there: children have no say."""
        self._loop = loop
        address = os.environ.pop("NOTIFY_SOCKET", "")
        period_us, pid = os.environ.pop("WATCHDOG_USEC", ""), os.environ.pop("WATCHDOG_PID", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        is_watched = period_us.isdecimal() and pid in ("", str(os.getpid()))
        self._period_s = int(period_us) / _MICROSECONDS / 2 if is_watched else 0.0
        self._timer: asyncio.TimerHandle | None = None

    def say_starting(self) -> None:
        """The service loads its models; systemd waits for it as long as the event loop turns.

        The loads themselves have limits, and a TensorRT engine is built for longer than a start may take.
        """
        self._send(f"EXTEND_TIMEOUT_USEC={_START_MORE_S * _MICROSECONDS:.0f}")
        if self._address:
            self._timer = self._loop.call_later(_START_MORE_S / 3, self.say_starting)

    def say_ready(self, status: str) -> None:
        """The service answers requests; from now on the watchdog hears that the event loop turns."""
        self._end_timer()
        self._send(f"READY=1\nSTATUS={status}")
        if self._period_s > 0:
            self._show_life()

    def say_stopping(self) -> None:
        """The service is about to end; the watchdog hears nothing more."""
        self._end_timer()
        self._send("STOPPING=1")

    def _show_life(self) -> None:
        """Called by the loop, so it is only said while the loop turns."""
        self._send("WATCHDOG=1")
        self._timer = self._loop.call_later(self._period_s, self._show_life)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
            teller.setblocking(False)
            teller.sendto(message.encode(), self._address)
