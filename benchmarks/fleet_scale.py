"""Many TLS devices against the real mosquitto and the real manager, on this machine.

    scripts/python -m benchmarks.fleet_scale [--devices 500]
    ... --gates --devices 1000

Real: mosquitto, `edgekit fleet up` in a process of its own, TLS with a certificate each, signed documents,
and the agent's decisions. Simulated: downloads, slots and services of the devices. Three things happen: all
devices connect; one rollout offers a release to all of them in a single wave; all connections break at once,
and a second release follows when all are back. Ends by itself after 280 s; keys and certificates are kept in
the folder for temporary files, for the next call. With --gates, bad releases follow a good one instead, in
waves of 1, 10, 50 and 100 %: how many devices get them, and how long the way back takes.
"""

import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fleet_parts import MODEL, TARGET, limit_time, roll_out, running_fleet_up, wait_for_end
from benchmarks.processes import list_children, read_cpu_s, read_memory
from benchmarks.results import make_parser, write_json
from tests.free_port import free_port

from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.operations.rollouts import find_rollout
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.simulation.behaviour import DeviceBehaviour, VersionBehaviour
from edgekit_fleet.simulation.enrolment import enrol_simulated, read_access
from edgekit_fleet.simulation.simulated_device import SimulatedDevice, SimulatedMember
from edgekit_fleet.simulation.simulated_fleet import SimulatedFleet, allow_many_files
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings

LIMIT_S = 280
QUIET = DeviceBehaviour(figures_s=300.0, install_s=0.5, confirm_s=1.0)
TALKING = DeviceBehaviour(figures_s=5.0, install_s=0.5, confirm_s=1.0)
BAD = {
    "2.0.0": ("crash loop", VersionBehaviour(crashes=1.0)),
    "3.0.0": ("NaN", VersionBehaviour(not_finite=1.0)),
    "4.0.0": ("2 x latency", VersionBehaviour(latency=2.0)),
    "5.0.0": ("-5 points of agreement", VersionBehaviour(agreement=0.92)),
}


def prepare(devices: int, folder: Path) -> list[SimulatedMember]:
    """Return the devices of a fleet in `folder`; keys and certificates are made once for all calls."""
    kept = Path(tempfile.gettempdir()) / f"edgekit-fleet-scale-{devices}"
    names = [f"sim-{number:05}" for number in range(devices)]
    if not (kept / "done").exists():
        shutil.rmtree(kept, ignore_errors=True)
        fleet = FleetFolder(kept / "fleet")
        fleet.write_settings(FleetSettings())
        TufRepository(fleet.repository, fleet.repository_keys).create(time.time())
        store = fleet.open_store()
        enrol_simulated(store, Authority(fleet.identity), names, kept / "devices", target=TARGET)
        store.close()
        (kept / "done").touch()
    shutil.copytree(kept / "fleet", folder)
    return [
        SimulatedMember(device=name, target=TARGET, pem=kept / "devices" / f"{name}.pem") for name in names
    ]


class Meter:
    """Processor time and memory of manager, broker and simulator."""

    def __init__(self, manager: int, broker: int) -> None:
        self.pids = {"manager": manager, "broker": broker, "simulator": os.getpid()}
        self.begin()

    def begin(self) -> None:
        self._cpu_s = {name: read_cpu_s(pid) for name, pid in self.pids.items()}

    def take(self) -> dict[str, float]:
        return {name: read_cpu_s(pid) - self._cpu_s[name] for name, pid in self.pids.items()}

    def memory(self, name: str) -> tuple[float, float]:
        memory = read_memory(self.pids[name])
        return memory["Rss"] / 2**20, memory["Pss"] / 2**20


def holds(version: str, device: SimulatedDevice) -> bool:
    desired = device.desired
    return desired is not None and any(model.version == version for model in desired.models)


def offer(store: Store, devices: SimulatedFleet, version: str, limit_s: float) -> dict[str, float]:
    """Roll a release out in one wave; returns when desired documents arrived, and all had installed it."""
    count = len(devices.devices)
    asked = time.monotonic()
    name = roll_out(store, version, size_bytes=5_000_000, waves="100%", minimum=count, soak_s=1.0)
    begin = time.monotonic()
    devices.wait_until(lambda device: holds(version, device), limit_s)
    arrivals = sorted(device.arrived_at - begin for device in devices.devices.values())
    issued = [device.desired.issued_at for device in devices.devices.values() if device.desired is not None]
    offset = time.time() - time.monotonic()
    ages = sorted(
        device.arrived_at + offset - device.desired.issued_at
        for device in devices.devices.values()
        if device.desired is not None
    )
    devices.wait_until(lambda device: device.versions.get(MODEL) == version, limit_s)
    installed_s = time.monotonic() - begin
    wait_for_end(store, name, limit_s)
    return {
        "ordered_s": begin - asked,
        "signed_s": max(issued) - min(issued),
        "p50_s": statistics.median(arrivals),
        "p99_s": arrivals[int(count * 0.99) - 1],
        "max_s": arrivals[-1],
        "document_p50_s": statistics.median(ages),
        "document_p99_s": ages[int(count * 0.99) - 1],
        "installed_s": installed_s,
        "succeeded_s": time.monotonic() - begin,
    }


@contextlib.contextmanager
def running_fleet(
    folder: FleetFolder, members: list[SimulatedMember], behaviour: DeviceBehaviour
) -> Iterator[tuple[Store, SimulatedFleet, Meter]]:
    """Start everything, and wait until all devices hold their first document."""
    settings = FleetSettings(broker_port=free_port(), web_port=free_port(), console_port=free_port())
    folder.write_settings(settings)
    authority = Authority(folder.identity)
    authority.make_server(("127.0.0.1", "localhost"))
    behaviours = {member.device: behaviour for member in members}
    versions = {version: bad for version, (_, bad) in BAD.items()}
    with running_fleet_up(folder.path) as manager, contextlib.closing(folder.open_store()) as store:
        meter = Meter(manager, list_children(manager)[0])
        access = read_access(folder, settings)
        with SimulatedFleet(members, access, behaviours=behaviours) as devices:
            devices.wait_until(lambda device: device.is_online and device.desired is not None, 150)
            print_row("connected", meter.take())
            if behaviour is TALKING:
                devices.versions.update(versions)
            yield store, devices, meter


def measure(folder: FleetFolder, members: list[SimulatedMember]) -> dict[str, object]:
    found: dict[str, object] = {}
    with running_fleet(folder, members, QUIET) as (store, devices, meter):
        meter.begin()
        found["wave"] = offer(store, devices, "1.0.0", 90) | {"cpu_s": meter.take()}
        print_row("wave", found["wave"])
        found["storm"] = storm(devices, meter)
        print_row("storm", found["storm"])
        meter.begin()
        found["second"] = offer(store, devices, "2.0.0", 90) | {"cpu_s": meter.take()}
        print_row("second wave", found["second"])
        end = {
            "lost": len(members) - devices.count(lambda device: holds("2.0.0", device)),
            "rss_pss_mb": {name: meter.memory(name) for name in meter.pids},
        }
        print_row("end", end)
    return found | end


def measure_gates(folder: FleetFolder, members: list[SimulatedMember]) -> dict[str, object]:
    found: dict[str, object] = {}
    with running_fleet(folder, members, TALKING) as (store, devices, _):
        offer(store, devices, "1.0.0", 90)
        time.sleep(2 * TALKING.figures_s)  # figures of the good version
        for version, (name, _) in BAD.items():
            found[name] = stop_bad(store, devices, version)
            print_row(name, found[name])
    return found


def stop_bad(store: Store, devices: SimulatedFleet, version: str) -> dict[str, object]:
    """Roll a bad release out; returns how many devices got it, and when all were back."""
    begin = time.monotonic()
    name = roll_out(store, version, size_bytes=5_000_000, soak_s=10.0)
    left_out = find_rollout(store, name).members.get("refused", 0)  # still on the way back from the last one
    while (rollout := find_rollout(store, name)).state == "running" and time.monotonic() - begin < 60:
        time.sleep(0.05)
    stopped = time.monotonic()

    def is_back(device: SimulatedDevice) -> bool:
        return device.versions[MODEL] == "1.0.0" and not holds(version, device)

    devices.wait_until(is_back, 60)
    return {
        "state": rollout.state,
        "because": rollout.because,
        "exposed": len(devices.devices) - rollout.members.get("waiting", 0) - left_out,
        "stopped_s": stopped - begin,
        "all_back_s": time.monotonic() - stopped,
    }


def storm(devices: SimulatedFleet, meter: Meter) -> dict[str, object]:
    """Break all connections off; returns how long it takes until all are back."""
    before = {name: device.counts.connects for name, device in devices.devices.items()}
    resumed = sum(device.counts.resumed for device in devices.devices.values())
    meter.begin()
    devices.drop()
    seconds = devices.wait_until(
        lambda device: device.is_online and device.counts.connects > before[device.name], 120
    )
    cpu_s = meter.take()
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "manager_share": cpu_s["manager"] / sum(cpu_s.values()),
        "resumed": sum(device.counts.resumed for device in devices.devices.values()) - resumed,
    }


def print_row(name: str, figures: object) -> None:
    rounded = json.loads(json.dumps(figures), parse_float=lambda text: round(float(text), 3))
    print(f"{name:12} {json.dumps(rounded)}", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--devices", type=int, default=500)
    parser.add_argument("--gates", action="store_true", help="bad releases instead of scale")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    allow_many_files(options.devices + 200)
    with tempfile.TemporaryDirectory(prefix="edgekit-fleet-scale-") as place:
        folder = FleetFolder(Path(place) / "fleet")
        members = prepare(options.devices, folder.path)
        limit_time(LIMIT_S)
        found: dict[str, object] = {"devices": options.devices}
        if options.gates:
            found |= measure_gates(folder, members)
        else:
            found |= measure(folder, members)
    write_json(options.json, found)


if __name__ == "__main__":
    main()
