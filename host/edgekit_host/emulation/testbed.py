"""Emulates a device, a server and a link on this machine, to measure and demonstrate offloading.

With root and iproute2, both sides are network namespaces with the kernel's TCP between them
(`namespace_link`). Otherwise both sides use loopback, with a proxy in front of the server (`proxy_link`).
"""

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias

from edgekit_host.emulation import proxy_link
from edgekit_host.emulation.cpu_quota import CpuQuota
from edgekit_host.emulation.enter import NOTHING
from edgekit_host.emulation.namespace_link import SERVER_HOST
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.system.child_process import ChildProcess, JsonChild, Output

Side: TypeAlias = Literal["device", "server"]
LinkKind: TypeAlias = Literal["namespaces", "proxy"]

_ANSWER_LIMIT_S: Final = 20.0
_ROOM: Final = "edgekit_host.emulation"
_ROOT: Final = Path("/")


def can_make_namespaces() -> bool:
    """Return whether this machine can link network namespaces, with root, `ip`, `tc` and TUN devices."""
    has_programs = all(shutil.which(program) for program in ("ip", "tc"))
    return os.geteuid() == 0 and has_programs and Path("/dev/net/tun").exists()


class Testbed(contextlib.AbstractContextManager["Testbed"]):
    """An emulated device and server, whose processes are killed at the end of a `with` block.

    The thread that creates the testbed must outlive it, because the kernel kills the processes when this
    thread ends.

    Attributes:
        server_host: The address under which the device reaches the server.
        label: What is emulated and how, for the results of measurements.
        quota: The CPU quota of the device's processes, or None.
    """

    __test__ = False  # pytest would collect it as a test by its name

    def __init__(self, *, device_share: float | None = None, kind: LinkKind | None = None) -> None:
        """Create both sides, and a link with 20 Mbit/s each way and a round-trip time of 20 ms.

        Args:
            device_share: The share of one processor for the device's processes, or None for no limit. A share
                needs root.
            kind: How the link is emulated. The default is namespaces if possible, or else the proxy.

        Raises:
            ConfigError: This machine or this user cannot emulate that.
        """
        self.kind: LinkKind = kind or ("namespaces" if can_make_namespaces() else "proxy")
        self._namespaces = {"device": NOTHING, "server": NOTHING}
        self._rates = {"up_bits_per_s": 20e6, "down_bits_per_s": 20e6, "rtt_s": 0.02}
        with contextlib.ExitStack() as undo:
            self.quota = None if device_share is None else undo.enter_context(CpuQuota(device_share))
            if self.kind == "namespaces":
                self.server_host = SERVER_HOST
                self.label = "emulated: network namespaces with tbf and a TUN relay for delay"
                self._link = undo.enter_context(JsonChild(f"{_ROOM}.namespace_link"))
                self._namespaces = self._receive()
            else:
                self.server_host = proxy_link.HOST
                self.label = "emulated: proxy that limits bandwidth and adds delay, on loopback"
                self._link = undo.enter_context(JsonChild(f"{_ROOM}.proxy_link"))
            if self.quota is not None:
                self.label += f"; {self.quota.label.removeprefix('emulated: ')} on the device"
            self._order(is_blocked=False)
            self._open = undo.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def set_link(self, *, up_mbit_s: float, down_mbit_s: float, rtt_ms: float) -> None:
        """Change the link, and unblock it. Open connections stay open.

        Args:
            up_mbit_s: The TCP payload bandwidth to the server.
            down_mbit_s: The TCP payload bandwidth from the server.
            rtt_ms: The round-trip time of a small message, at least 0.

        Raises:
            ConfigError: A bandwidth is not above 0, the round trip is negative, or the link has ended.
        """
        if min(up_mbit_s, down_mbit_s) <= 0 or rtt_ms < 0:
            raise ConfigError(
                f"link of {up_mbit_s:g} and {down_mbit_s:g} Mbit/s with {rtt_ms:g} ms: expected bandwidths "
                "above 0; use block() for a link that is down"
            )
        self._rates = {
            "up_bits_per_s": up_mbit_s * 1e6,
            "down_bits_per_s": down_mbit_s * 1e6,
            "rtt_s": rtt_ms / 1e3,
        }
        self._order(is_blocked=False)

    def block(self) -> None:
        """Block the link until `set_link`. Nothing arrives, and neither side gets an error."""
        self._order(is_blocked=True)

    def reach(self, port: int) -> tuple[str, int]:
        """Return the host and port under which the device reaches the server's `port`."""
        if self.kind == "namespaces":
            return self.server_host, port
        self._link.send({"port": port}, _ANSWER_LIMIT_S)
        return self.server_host, int(self._receive()["port"])

    def spawn(
        self, side: Side, command: Sequence[str], *, folder: Path = _ROOT, output: Output = "keep"
    ) -> ChildProcess:
        """Start a command on one side. The command is killed by `close`, or when this process ends.

        Processes of `device` are slowed by the quota. Processes of `server` run on the other processors.
        `output` says what happens to the output of the command, see `Output`.

        Raises:
            OSError: The command cannot be started.
        """
        procs_file, avoided_cpu = NOTHING, NOTHING
        if self.quota is not None and side == "device":
            procs_file = str(self.quota.procs_file)
        elif self.quota is not None:
            avoided_cpu = str(self.quota.cpu)
        placement = (self._namespaces[side], procs_file, avoided_cpu)
        child = ChildProcess(f"{_ROOM}.enter", *placement, *command, folder=folder, output=output)
        return self._open.enter_context(child)

    def close(self) -> None:
        """Kill all processes and remove both sides. A second call does nothing."""
        self._open.close()

    def _order(self, *, is_blocked: bool) -> None:
        self._link.send({**self._rates, "is_blocked": is_blocked}, _ANSWER_LIMIT_S)
        self._receive()

    def _receive(self) -> dict[str, Any]:
        """Return the answer from the process of the link.

        Raises:
            ConfigError: The process refused the order, or has ended.
        """
        try:
            answer: dict[str, Any] = self._link.receive(_ANSWER_LIMIT_S)
        except (OSError, EOFError) as cause:
            end = self._link.explain_end()
            raise ConfigError(f"the emulated link ended {end}") from cause
        if "error" in answer:
            raise ConfigError(
                f"network namespaces need root, /dev/net/tun, `ip` and `tc` (iproute2): {answer['error']}"
            )
        return answer
