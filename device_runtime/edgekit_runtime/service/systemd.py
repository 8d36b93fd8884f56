"""Runs the service under systemd: its unit file and its notifications.

Source: sd_notify(3), sd_watchdog_enabled(3).
"""

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # to print a unit takes none of it
    import asyncio

_MICROSECONDS: Final = 1e6

_UNIT: Final = """\
[Unit]
Description=edgekit inference service
Documentation=man:systemd.exec(5)
After=network.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={command} serve
# Packages are trusted that the keys in /etc/edgekit/keys have signed.
Environment=EDGEKIT_STATE=/var/lib/edgekit EDGEKIT_HOME=/etc/edgekit EDGEKIT_CACHE=/var/cache/edgekit
Environment=ORT_DISABLE_TELEMETRY=1
Restart=always
RestartSec=100ms
WatchdogSec=10s
TimeoutStartSec=300s
TimeoutStopSec=45s
# SIGTERM only to the service, which ends its workers itself.
KillMode=mixed
# Not DynamicUser: its state folder can be reached by nobody who is to install a package, and its group by no
# application that is to use the socket.
User=edgekit
Group=edgekit
StateDirectory=edgekit
CacheDirectory=edgekit
RuntimeDirectory=edgekit
RuntimeDirectoryMode=0755
# A model's worker is ended before the service.
OOMPolicy=continue
OOMScoreAdjust=-100
LimitNOFILE=65536
NoNewPrivileges=yes
# Not PrivateDevices, nor ProtectClock, which closes /dev as well: engines open those of a GPU, and a
# Raspberry Pi tells of its power by one. The clock cannot be set without the capability.
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
UMask=0027

[Install]
WantedBy=multi-user.target
"""


class Notifier:
    """Notifies systemd. If the service runs without systemd, this does nothing."""

    def __init__(self, loop: "asyncio.AbstractEventLoop", *, extension_s: float = 60.0) -> None:
        """Remove the address of systemd from the environment, so that child processes cannot notify it.

        `extension_s` is the additional time that each `notify_starting` requests.
        """
        self._loop, self._extension_s = loop, extension_s
        address = os.environ.pop("NOTIFY_SOCKET", "")
        period_us, pid = os.environ.pop("WATCHDOG_USEC", ""), os.environ.pop("WATCHDOG_PID", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        is_watched = period_us.isdecimal() and pid in ("", str(os.getpid()))
        self._period_s = int(period_us) / _MICROSECONDS / 2 if is_watched else 0.0
        self._timer: asyncio.TimerHandle | None = None

    def notify_starting(self) -> None:
        """Ask systemd to extend the start timeout, now and regularly until `notify_ready`.

        Building a TensorRT engine takes longer than the default timeout. See also `load_timeout_s`.
        """
        self._send(f"EXTEND_TIMEOUT_USEC={self._extension_s * _MICROSECONDS:.0f}")
        if self._address:
            self._timer = self._loop.call_later(self._extension_s / 3, self.notify_starting)

    def notify_ready(self, status: str) -> None:
        """Report that the service is ready, and start to reset the watchdog regularly."""
        self._end_timer()
        self._send(f"READY=1\nSTATUS={status}")
        if self._period_s > 0:
            self._notify_alive()

    def notify_stopping(self) -> None:
        """Report that the service is stopping, and no longer reset the watchdog."""
        self._end_timer()
        self._send("STOPPING=1")

    def _notify_alive(self) -> None:
        """Reset the watchdog. The event loop calls this, so a loop that hangs does not reset it."""
        self._send("WATCHDOG=1")
        self._timer = self._loop.call_later(self._period_s, self._notify_alive)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            notifier.setblocking(False)
            notifier.sendto(message.encode(), self._address)


def write_unit() -> str:
    """Return the text of `edgekit.service`, which runs the `edgekit-device` of this Python environment."""
    return _UNIT.format(command=Path(sys.executable).parent / "edgekit-device")
