"""A process with two network namespaces that forwards packets between them. `Testbed` starts it.

Each namespace has a TUN interface. An outgoing packet first passes the queue discipline `tbf`, which slows
the sender as the queue of a modem does. This process then reads the packet, delays it by its transmission
time and half a round trip, and writes it unchanged and in order to the other interface. `tbf` alone would
pass the first packet without delay. Both sides use the kernel's own TCP.

The namespaces have no names. The kernel removes them with their interfaces and queues after all their
processes have ended, so nothing remains after a crash.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import socket
import struct
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from edgekit_host.emulation.enter import CLONE_NEWNET, enter_network
from edgekit_runtime.system.child_process import open_channel

DEVICE_HOST: Final = "10.77.0.1"
SERVER_HOST: Final = "10.77.0.2"
_INTERFACE: Final = "edgekit0"
_MTU_BYTES: Final = 1500
_TCP_PAYLOAD_BYTES: Final = 1448  # payload of a packet with time stamps. The rest is headers of IP and TCP
_TUNSETIFF: Final = 0x4004_54CA
_IFF_TUN_NO_PI: Final = 0x1001
_QUEUE_BYTES: Final = 1 << 20  # TCP keeps far less in the queue. A full queue would drop packets
# `tbf` passes a burst without delay. The clock below counts it. The burst never becomes smaller: a packet of
# several segments that is larger than a new burst would block the head of the queue for ever.
_BURST_BYTES: Final = 16_000
_MOST_PACKETS: Final = 64  # packets read from one side before the other side's turn


class OneWay:
    """The packets in one direction between the interfaces.

    Attributes:
        bytes_per_s: The speed of the link, including headers.
        delay_s: The time from sending to receiving the last bit of a packet.
    """

    def __init__(self, source: int, target: int) -> None:
        self.source, self._target = source, target
        self.bytes_per_s, self.delay_s, self.is_blocked = 1.0, 0.0, False
        self._packets: deque[tuple[float, bytes]] = deque()
        self._wire_free_at = 0.0

    def take(self) -> None:
        """Read up to 64 sent packets and schedule their arrival. A blocked link drops them."""
        for _ in range(_MOST_PACKETS):
            try:
                packet = os.read(self.source, _MTU_BYTES)
            except BlockingIOError:
                return
            if self.is_blocked:
                continue
            self._wire_free_at = max(time.monotonic(), self._wire_free_at) + len(packet) / self.bytes_per_s
            due = self._wire_free_at + self.delay_s
            if self._packets:
                due = max(due, self._packets[-1][0])  # a shorter delay does not let a packet overtake
            self._packets.append((due, packet))

    def deliver(self) -> float | None:
        """Write the packets that are due, and return when the next one is due, or None if there is none.

        The time is that of the monotonic clock.
        """
        while self._packets:
            due, packet = self._packets[0]
            if due > time.monotonic():
                return due
            self._packets.popleft()
            with contextlib.suppress(OSError):  # the interface goes down at the end
                os.write(self._target, packet)
        return None

    def drop_all(self) -> None:
        self._packets.clear()


class NamespaceLink:
    """The network namespaces of a device and a server, and the link between them."""

    def __init__(self) -> None:
        self._device, device_tun = _make_namespace(DEVICE_HOST, SERVER_HOST)
        self._server, server_tun = _make_namespace(SERVER_HOST, DEVICE_HOST)
        self._up, self._down = OneWay(device_tun, server_tun), OneWay(server_tun, device_tun)

    @property
    def paths(self) -> dict[str, str]:
        pid = os.getpid()
        return {"device": f"/proc/{pid}/fd/{self._device}", "server": f"/proc/{pid}/fd/{self._server}"}

    def apply(self, order: Mapping[str, Any]) -> None:
        """Change the bandwidths and the delay of the link, or block it. Connections stay open.

        `order` contains `is_blocked`. Unless the link is blocked, `order` also contains the round-trip time
        `rtt_s` and the TCP payload bandwidths `up_bits_per_s` and `down_bits_per_s`.
        """
        for direction, namespace, rate in (
            (self._up, self._device, "up_bits_per_s"),
            (self._down, self._server, "down_bits_per_s"),
        ):
            direction.is_blocked = order["is_blocked"]
            if direction.is_blocked:
                direction.drop_all()
                continue
            wire_bits_per_s = order[rate] * _MTU_BYTES / _TCP_PAYLOAD_BYTES
            direction.bytes_per_s, direction.delay_s = wire_bits_per_s / 8, order["rtt_s"] / 2
            enter_network(namespace)
            _run(
                f"tc qdisc replace dev {_INTERFACE} root handle 1: tbf"
                f" rate {round(wire_bits_per_s)}bit burst {_BURST_BYTES}b limit {_QUEUE_BYTES}b"
            )

    def relay(self, channel: socket.socket) -> None:
        """Forward packets until `channel` is closed. Each line of JSON in `channel` is passed to `apply`."""
        orders = channel.makefile("rw", encoding="ascii")
        while True:
            due = [at for at in (self._up.deliver(), self._down.deliver()) if at is not None]
            timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
            ready, _, _ = select.select(
                [self._up.source, self._down.source, channel.fileno()], [], [], timeout_s
            )
            for direction in (self._up, self._down):
                if direction.source in ready:
                    direction.take()
            if channel.fileno() in ready:
                line = orders.readline()
                if not line:
                    return
                try:
                    self.apply(json.loads(line))
                except OSError as cause:
                    orders.write(f"{json.dumps({'error': str(cause)})}\n")
                else:
                    orders.write("{}\n")
                orders.flush()


def _make_namespace(host: str, peer: str) -> tuple[int, int]:
    """Create a network namespace with an interface, and return the descriptors of both."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot make a network namespace: {os.strerror(code)}")
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", _INTERFACE.encode(), _IFF_TUN_NO_PI))
    Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")  # IPv6's own packets would use the link
    settings = Path("/proc/sys/net/ipv4")
    with contextlib.suppress(OSError):  # the choice of most devices; a host may have another one
        (settings / "tcp_congestion_control").write_text("cubic")
    # A new connection remembers nothing of the last one: else a measurement depends on earlier links.
    (settings / "tcp_no_metrics_save").write_text("1")
    _run("ip link set lo up")
    _run(f"ip address add {host} peer {peer} dev {_INTERFACE}")
    _run(f"ip link set {_INTERFACE} mtu {_MTU_BYTES} up")
    return namespace, tun


def _run(command: str) -> None:
    """Run `ip` or `tc` in the namespace of this thread.

    Raises:
        OSError: The program is not installed, or it failed.
    """
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"`{command}`: {done.stderr.strip()}")


def main() -> None:
    """Create the link, send the paths of the namespaces to the parent as JSON, and forward packets."""
    channel = open_channel()
    with contextlib.suppress(OSError):  # a relay that waits for a processor adds to the delay
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        link = NamespaceLink()
    except OSError as cause:
        channel.sendall(f"{json.dumps({'error': str(cause)})}\n".encode())
        return
    channel.sendall(f"{json.dumps(link.paths)}\n".encode())
    link.relay(channel)


if __name__ == "__main__":
    main()
