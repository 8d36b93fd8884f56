"""What only a machine that boots can show: systemd, watchdogs, lack of memory, power that fails, links."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from edgekit_hil.benches.device import Device
from edgekit_hil.benches.opening import Bench
from edgekit_hil.tests.booted_machine import (
    EVENTS,
    FIRST,
    MODEL,
    SECOND,
    UPDATE_EVENTS,
    InterruptedUpdate,
    ServiceMachine,
    try_event,
)
from edgekit_hil.tests.conftest import Recorder
from edgekit_hil.tests.host_side import Fleet, HostSide, require_mosquitto
from edgekit_hil.tests.models import PackageMaker

# labgrid drops the ssh of a machine that went down without waiting for its process.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

_DOWNLOAD_BYTES = 1 << 18  # 180 packets, of which a tenth is lost
# After 62, 13, 96 and 24 % of the time of an installation.
_SEEDS = {"power cut in an installation": (5, 1, 2, 3), "reboot in an installation": (5,)}


def require_booted(bench: Bench) -> None:
    """Skip the test where the device cannot be restored from a snapshot."""
    if not bench.can_restore:
        pytest.skip(f"bench '{bench.file.settings.name}' has no snapshots: bench 'arm64-booted' has")


@pytest.fixture(scope="module")
def machine(bench: Bench, packages: PackageMaker) -> ServiceMachine:
    """Return the machine on which the service of systemd serves the first version."""
    require_booted(bench)
    packages_by_version = {
        version: packages.make(MODEL, bench.file.settings.target, "ort", version)
        for version in (FIRST, SECOND)
    }
    return ServiceMachine(bench, packages_by_version, packages.public_key)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each event once, and power cuts at several moments, since their effects may differ."""
    if "event" in metafunc.fixturenames:
        cuts = metafunc.config.getoption("power_cuts")
        pairs = [(event, seed) for event in EVENTS for seed in _SEEDS.get(event, (1,))[:cuts]]
        metafunc.parametrize(("event", "seed"), pairs)


@pytest.mark.usefixtures("working_bench")
def test_right_version_serves_after_event(
    machine: ServiceMachine, evidence: Recorder, event: str, seed: int
) -> None:
    """Under the printed unit of systemd, the service serves the right version again after the event."""
    outcome = try_event(machine, event, EVENTS[event], seed=seed)

    assert outcome.is_right, outcome
    method = "emulated machine, wall clock"
    if (share := outcome.expected.share) is not None:
        end = "before" if outcome.expected.is_interrupted else "after"
        method += f"; down after {share:.0%} of the time of an installation, {end} its end"
        method += f"; version {outcome.version} serves"
    evidence(f"until the service answers after: {event}", outcome.seconds, "s", method)
    if outcome.restart_s is not None:
        evidence(f"until systemd restarts after: {event}", outcome.restart_s, "s", "systemd's clock")


@pytest.mark.usefixtures("working_bench")
@pytest.mark.parametrize("interruption", UPDATE_EVENTS)
def test_update_of_a_fleet_goes_on_after_the_machine_went_down_in_its_middle(
    bench: Bench,
    machine: ServiceMachine,
    packages: PackageMaker,
    evidence: Recorder,
    tmp_path: Path,
    interruption: str,
) -> None:
    """The machine goes down while the agent updates a model; its unit starts again, and the update ends."""
    require_mosquitto()
    target = bench.file.settings.target
    fleet = Fleet(HostSide(bench), tmp_path, packages.home)
    with fleet.up():
        package = packages.make(MODEL, target, "ort", SECOND)
        event = InterruptedUpdate(fleet, package, target, UPDATE_EVENTS[interruption])
        outcome = try_event(machine, interruption, event, seed=1)

    assert outcome.is_right, outcome
    method = "from the first word of the fleet, with the boot; emulated machine, wall clock"
    evidence(f"until the service answers after: {interruption}", outcome.seconds, "s", method)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """Return the port of a server of this machine with a file `download`, and the file's hash."""
    content = bytes(range(256)) * (_DOWNLOAD_BYTES // 256)
    (tmp_path / "download").write_bytes(content)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1], hashlib.sha256(content).hexdigest()
        server.shutdown()
        thread.join()


def test_download_is_whole_over_a_link_that_loses_and_reorders_packets(
    bench: Bench, device: Device, evidence: Recorder, served: tuple[int, str]
) -> None:
    """Netem drops and reorders what the machine receives, and a download is whole all the same."""
    require_booted(bench)
    port, digest = served
    device.run("modprobe -a ifb act_mirred cls_matchall sch_ingress sch_netem")
    device.run("ip link add link0 type ifb && ip link set link0 up")
    device.run("tc qdisc add dev eth0 handle ffff: ingress")
    device.run("tc filter add dev eth0 parent ffff: matchall action mirred egress redirect dev link0")
    device.run("tc qdisc add dev link0 root netem delay 20ms 10ms loss 10% reorder 5%")
    code = (
        "import hashlib, sys, urllib.request as u;"
        " print(hashlib.sha256(u.urlopen(sys.argv[1], timeout=60).read()).hexdigest())"
    )

    received_digest = device.run_python(code, f"http://10.0.2.2:{port}/download", limit_s=180)

    assert received_digest == digest
    counted = device.run("tc -s qdisc show dev link0")
    dropped = int(counted.split("dropped ")[1].split(",")[0])
    assert dropped > 0, counted
    evidence("packets dropped in a whole download", dropped, "", "netem on the emulated machine")
