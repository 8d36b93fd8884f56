"""Servers that tests run on this machine for the device: a server of offloading, a fleet and its manager."""

import contextlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from labgrid.exceptions import NoResourceFoundError

from edgekit_hil.benches.opening import Bench
from edgekit_hil.tests.bench_target import TOOLKIT
from edgekit_runtime.agent.documents import ENDED
from edgekit_runtime.errors import BenchError
from edgekit_runtime.system.child_process import ChildProcess, run_program

LOOPBACK: Final = "127.0.0.1"
_CONNECT_LIMIT_S: Final = 10.0
_UP_LIMIT_S: Final = 60.0
_COMMAND_LIMIT_S: Final = 60.0
_MAX_OUTPUT_BYTES: Final = 1 << 20
_BEGIN_LIMIT_S: Final = 120.0
_POLL_S: Final = 0.1


def require_mosquitto() -> None:
    """Skip the test where a fleet has no broker."""
    if not (shutil.which("mosquitto") or os.access("/usr/sbin/mosquitto", os.X_OK)):
        pytest.skip("mosquitto is missing on this machine: apt install mosquitto")


class HostSide:
    """This machine, as the device of a bench sees it.

    Attributes:
        address: address at which the device reaches it.
        listen_address: address on which a server must listen for that.
    """

    def __init__(self, bench: Bench) -> None:
        self._testbed = getattr(bench.command, "testbed", None)
        self.listen_address = self.address = _find_own_address(bench)
        if self._testbed is not None:
            self.listen_address = self.address = self._testbed.server_host
        elif bench.host_address is not None:
            self.address = bench.host_address

    def free_port(self) -> int:
        """Return a port on which nothing listens here."""
        with socket.create_server((LOOPBACK, 0)) as free:
            port: int = free.getsockname()[1]
        return port

    def start(self, module: str, *arguments: str, **variables: str) -> ChildProcess:
        """Start `python -m MODULE`, with further variables of the environment; the caller closes it."""
        if self._testbed is None:
            return ChildProcess(module, *arguments, output="keep", variables=variables)
        settings = [f"{name}={text}" for name, text in variables.items()]
        command = ["env", *settings, sys.executable, "-m", module, *arguments]
        started: ChildProcess = self._testbed.spawn("server", command)
        return started


def _find_own_address(bench: Bench) -> str:
    """Return the address from which this machine reaches the device."""
    try:
        service = bench.target.get_resource("NetworkService", wait_avail=False)
    except NoResourceFoundError:
        return LOOPBACK
    with socket.create_connection((service.address, service.port), _CONNECT_LIMIT_S) as link:
        own: str = link.getsockname()[0]
    return own


class Fleet:
    """A fleet that `edgekit fleet up` runs on this machine.

    Attributes:
        host: machine on which it runs.
        folder: folder of the fleet, and of a device of this machine.
    """

    def __init__(self, host: HostSide, folder: Path, home: Path) -> None:
        """Prepare a fleet; nothing runs yet.

        Args:
            host: machine on which it runs.
            folder: empty folder.
            home: edgekit's configuration, with the keys of the packages.
        """
        self.host, self.folder = host, folder
        self._variables = {"EDGEKIT_FLEET": str(folder / "fleet"), "EDGEKIT_HOME": str(home)}

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Run broker, web server and manager.

        Raises:
            BenchError: they do not start.
        """
        ports = [f"--{name}-port={self.host.free_port()}" for name in ("broker", "web", "console")]
        listen = [f"--host={self.host.listen_address}", f"--name={self.host.address}"]
        arguments = ["fleet", "up", "--json", *listen, *ports]
        with self.host.start(TOOLKIT, *arguments, **self._variables) as child:
            deadline = time.monotonic() + _UP_LIMIT_S
            while not child.output.endswith(b"\n"):
                if child.wait(_POLL_S) is not None or time.monotonic() > deadline:
                    raise BenchError(f"the fleet does not start: it ended {child.explain_end()}")
            yield

    def run(self, *arguments: str, limit_s: float = _COMMAND_LIMIT_S) -> Any:
        """Return the JSON of `edgekit fleet ARGUMENTS`; the last value if it prints several.

        Raises:
            BenchError: it failed, or did not end within `limit_s`.
        """
        settings = [f"{name}={text}" for name, text in self._variables.items()]
        command = ["env", *settings, sys.executable, "-m", TOOLKIT, "fleet", *arguments, "--json"]
        done = run_program(command, (), limit_s, _MAX_OUTPUT_BYTES)
        output = done.output.decode()
        if done.exit_code is None or (done.exit_code and not output):
            message = done.last_line or "it did not end"
            raise BenchError(f"`edgekit fleet {' '.join(arguments)}` on this machine: {message}")
        return _read_last(output)

    def invite(self, name: str) -> str:
        """Return a code with which a device of that name enrols."""
        (invitation,) = self.run("enroll", "--name", name, "--tag", f"bench={name}")
        return str(invitation["code"])

    @contextlib.contextmanager
    def run_device(self, name: str, target: str) -> Iterator[None]:
        """Run another device of the fleet on this machine: an agent alone, which installs and tests."""
        folder = self.folder / name
        folder.mkdir()
        variables = {
            **{f"EDGEKIT_{part.upper()}": str(folder / part) for part in ("home", "state", "cache")},
            "XDG_RUNTIME_DIR": str(folder),
            "EDGEKIT_TARGET": target,
        }
        code = self.invite(name)
        with self.host.start("edgekit_runtime.cli", "enroll", "--code", code, **variables) as enrolling:
            if enrolling.wait(_COMMAND_LIMIT_S) != 0:
                raise BenchError(f"a device of this machine does not enrol: {enrolling.explain_end()}")
        with self.host.start("edgekit_runtime.cli", "agent", **variables):
            yield

    def start_rollout(self, release: str, package: Path, *, to: str = "all", waves: str = "100%") -> None:
        self.run("release", str(package), "--name", release)
        options = ["--to", to, "--waves", waves, "--minimum", "1", "--soak", "1"]
        self.run("rollout", "start", release, "--name", release, *options)

    def wait_ended(self, rollout: str, limit_s: float) -> dict[str, Any]:
        """Return how a rollout has ended.

        Raises:
            BenchError: it has not ended within `limit_s`.
        """
        (summary,) = self.run("rollout", "watch", rollout, limit_s=limit_s)
        report: dict[str, Any] = summary
        return report

    def read_steps(self, rollout: str) -> list[tuple[str, str]]:
        """Return the steps of a rollout from its log, in order: (`start` or an outcome, device)."""
        steps = []
        for record in self.run("audit", rollout):
            for step in record["detail"].get("entries", ()):
                if step["kind"] == "decided" and step["action"] == "start":
                    steps += [("start", device) for device in step["devices"]]
                elif step["kind"] == "answered" and step.get("outcome"):
                    steps.append((step["outcome"], step["device"]))
        return steps

    def wait_begun(self, name: str) -> None:
        """Wait until a device reports that it has begun an update.

        Raises:
            BenchError: it has not begun in two minutes, or the update has ended already.
        """
        deadline = time.monotonic() + _BEGIN_LIMIT_S
        while not self.check_open(name):
            if time.monotonic() > deadline:
                raise BenchError(f"device {name} begins no update")

    def check_open(self, name: str) -> bool:
        """Return whether a device has begun an update.

        Raises:
            BenchError: the update has ended already.
        """
        states = {execution["state"] for execution in self.run("device", name)["executions"]}
        if states and states <= ENDED:
            how = ", ".join(sorted(states))
            raise BenchError(f"device {name} has ended its update ({how}), which was to be interrupted")
        return bool(states)


def _read_last(text: str) -> Any:
    """Return the last of several JSON values."""
    decoder, at, document = json.JSONDecoder(), 0, None
    while at < len(text.rstrip()):
        document, at = decoder.raw_decode(text, at)
        at += len(text[at:]) - len(text[at:].lstrip())
    return document
