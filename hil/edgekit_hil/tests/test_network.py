"""What the device does over its network: it offloads, and it takes part in rollouts of a fleet."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from edgekit_hil.benches.device import Device
from edgekit_hil.benches.opening import Bench
from edgekit_hil.tests.bench_target import OPEN_LIMIT_S, BenchTarget
from edgekit_hil.tests.conftest import Recorder
from edgekit_hil.tests.host_side import LOOPBACK, Fleet, HostSide, require_mosquitto
from edgekit_hil.tests.models import PackageMaker
from edgekit_hil.tests.programs import read_program
from edgekit_runtime.errors import BenchError

_WAIT_S: Final = 120.0
_POLL_S: Final = 0.2
_LOCAL_S: Final = 0.3  # a request on the device alone. With the server it takes about 50 ms
_SERVER_PORT: Final = 8443
_SERVER_SETTINGS: Final = """\
[listen]
unix_socket = ""
host = "{host}"
port = {port}
tls_certificate = "{folder}/cert.pem"
tls_key = "{folder}/key.pem"
token_file = "{folder}/token"
[http]
server_timing = true
"""
_MODEL: Final = "mnist5k_dscnn"
_VERSION: Final = "1.0.0"
# The order of a rollout is drawn from its name and those of the devices: here the bench's comes first.
_ROLLOUT, _ON_BENCH, _ON_HOST = "canary", "on-bench", "on-host"


class OffloadingDevice:
    """A device whose session sends requests to a server without a pause."""

    def __init__(self, device: Device, package: str) -> None:
        device.run(f"cat >offload.py <<'END_OF_PROGRAM'\n{read_program('offload')}END_OF_PROGRAM")
        self._device = device
        self._pid = device.start(f"{device.python} offload.py {package} stop {_LOCAL_S}", "offload.log")

    def wait(self, condition: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the newest line that the session prints, once `is_so` holds for it."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            text = self._device.run("tail -n 1 offload.log")
            line: dict[str, Any] = json.loads(text) if text.startswith("{") else {}
            if line and is_so(line):
                return line
            if time.monotonic() > deadline:
                raise BenchError(f"{condition}: not within {_WAIT_S:.0f} s: {text}")
            time.sleep(_POLL_S)

    def stop(self) -> list[dict[str, Any]]:
        """End the session, and return all lines."""
        self._device.run("touch stop")
        self._device.wait(self._pid)
        lines = self._device.run("cat offload.log").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@contextlib.contextmanager
def serve_whole(bench: Bench, device: Device, packages: PackageMaker, package: Path) -> Iterator[None]:
    """Serve a package on this machine, and let the device use it."""
    host = HostSide(bench)
    folder = packages.make_certificate(host.address)
    (folder / "service.toml").write_text(
        _SERVER_SETTINGS.format(host=host.listen_address, port=_SERVER_PORT, folder=folder)
    )
    words = ["serve", "--config", str(folder / "service.toml"), "--package", str(package)]
    with host.start("edgekit_runtime.cli", *words, EDGEKIT_HOME=str(packages.home)) as server:
        while "ready at" not in server.last_line:
            if server.wait(_POLL_S) is not None:
                raise BenchError(f"the server does not start: it ended {server.explain_end()}")
        token, authority = (device.put(folder / name, name) for name in ("token", "cert.pem"))
        url = f"https://{host.address}:{_SERVER_PORT}"
        device.edgekit("offload", "server", url, "--token-file", token, "--ca-file", authority)
        yield


def test_every_request_is_answered_right_while_the_link_goes_away_and_returns(
    bench: Bench,
    device: Device,
    packages: PackageMaker,
    target: BenchTarget,
    evidence: Recorder,
    tmp_path: Path,
) -> None:
    """A session that uses a server goes on alone without its link, then uses it again (a model made slow)."""
    if not hasattr(bench.command, "drop_link"):
        pytest.skip(f"bench '{bench.file.settings.name}' has no link that can be dropped")
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing on this machine: apt install openssl")
    package = packages.make(_MODEL, target.name, target.engine)
    device.trust(packages.public_key)
    remote = device.put(packages.offload(package, tmp_path, _LOCAL_S), "model.edgepkg")
    with serve_whole(bench, device, packages, package):
        session = OffloadingDevice(device, remote)
        before = session.wait("the server is used", lambda line: line["remote"] >= 3)
        bench.command.drop_link()
        gone = session.wait(
            "the device goes on alone",
            lambda line: line["plan"] == "local" and line["requests"] >= before["requests"] + 5,
        )
        bench.command.restore_link()
        session.wait("the server is used again", lambda line: line["remote"] >= gone["remote"] + 3)
        lines = session.stop()

    assert lines[-1]["wrong"] == 0
    assert [line["requests"] for line in lines] == list(range(1, len(lines) + 1))
    without = [line for line in lines if before["requests"] < line["requests"] <= gone["requests"]]
    method = f"all of {len(lines)} requests right, {len(without)} of them around the loss, {target.engine}"
    longest_ms = 1e3 * max(line["took_s"] for line in without)
    evidence("longest answer when the link goes away", longest_ms, "ms", method)
    points = [(line["at_s"], 1e3 * line["took_s"]) for line in lines]
    evidence.curve("answers while the link goes away and returns", ("s", "ms"), points)


def test_release_goes_to_this_device_first_and_to_others_once_it_is_well_here(
    bench: Bench,
    device: Device,
    packages: PackageMaker,
    target: BenchTarget,
    evidence: Recorder,
    tmp_path: Path,
) -> None:
    """A fleet offers a release to this device first, and to another one after this one has answered well."""
    settings = bench.file.settings
    if not settings.has_time:
        pytest.skip(f"bench '{settings.name}' is too slow; bench 'arm64-booted' has a rollout of its own")
    host = HostSide(bench)
    if host.address == LOOPBACK:
        pytest.skip(f"the device of bench '{settings.name}' has no network of its own")
    require_mosquitto()
    package = packages.make(_MODEL, target.name, target.engine)
    fleet = Fleet(host, tmp_path, packages.home)
    with fleet.up(), fleet.run_device(_ON_HOST, target.name):
        runtime = f"{device.python} -m edgekit_runtime.cli"
        code = fleet.invite(_ON_BENCH)
        device.run(f"EDGEKIT_TARGET={target.name} {runtime} enroll --code {code}")
        device.start(f"{runtime} agent", "agent.log")
        begun_s = time.monotonic()
        fleet.start_rollout(_ROLLOUT, package, waves="1,100%")
        ended = fleet.wait_ended(_ROLLOUT, OPEN_LIMIT_S)
        seconds = time.monotonic() - begun_s
        steps = fleet.read_steps(_ROLLOUT)

    assert (ended["state"], ended["members"]) == ("succeeded", {"succeeded": 2})
    assert steps == [(event, name) for name in (_ON_BENCH, _ON_HOST) for event in ("start", "succeeded")]
    (model,) = device.edgekit("status")["models"]
    assert model["opens"] == _VERSION
    evidence(
        "rollout in two waves, this device first",
        seconds,
        "s",
        f"with mosquitto, soak of 1 s, {target.engine}",
    )
