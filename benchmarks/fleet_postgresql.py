"""A fleet on PostgreSQL: restarts, failover, a full disk, managers that are killed, and one or two of them.

    scripts/python -m benchmarks.fleet_postgresql PART
        [--devices 200] [--times 50] [--seed 1]

PART is `restart`, `failover`, `full`, `kill` or `scale`; each ends by itself after 230 s. Real: PostgreSQL
with a cluster of its own on loopback that syncs to the disk, mosquitto, TLS with certificates, processes of
`edgekit fleet up --join`, the agent's decisions. Simulated: downloads, slots and services of the devices.

- restart: the database is stopped, or killed, while a rollout runs and devices state events.
- failover: the first server is killed; its synchronous copy is promoted. The URL names both.
- full: the disk of the database fills up (a tmpfs; needs root), and is freed after some seconds.
- kill: one of two managers is killed in mid-rollout and started again.
- scale: the same rollout with one and with two managers.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.fleet_parts import MODEL, TARGET, find_log, limit_time, roll_out, start_fleet, wait_for_end
from benchmarks.results import make_parser, write_json
from sqlalchemy import select
from tests.fleet.postgresql_server import PostgresqlServer, new_database
from tests.free_port import free_port

from edgekit_fleet.broker.mosquitto import Mosquitto, write_configuration
from edgekit_fleet.identity.authority import Authority, open_authority
from edgekit_fleet.operations.rollouts import replay_rollout
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.rollouts.progress import Decision
from edgekit_fleet.rollouts.runner import read_entries
from edgekit_fleet.simulation.behaviour import DeviceBehaviour
from edgekit_fleet.simulation.enrolment import enrol_simulated, read_access
from edgekit_fleet.simulation.simulated_device import SimulatedDevice
from edgekit_fleet.simulation.simulated_fleet import SimulatedFleet, allow_many_files
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.tables import SHARDS, AuditRow, DesiredRow, DeviceRow, ManagerRow, ShardRow
from edgekit_runtime.errors import OutputError

LIMIT_S = 230
ALARM_S = 65.0  # a manager writes an alarm of a kind once a minute and device
FAST = DeviceBehaviour(figures_s=30.0, install_s=0.2, confirm_s=0.3)


class Site:
    """A fleet whose database and broker are elsewhere, with processes of managers."""

    def __init__(self, folder: FleetFolder, url: str, devices: int) -> None:
        port = free_port()
        settings = FleetSettings(broker_port=port, web_port=free_port(), store_url=url)
        settings = replace(settings, brokers=(f"127.0.0.1:{port}",))
        folder.write_settings(settings)
        self.folder, self.settings, self.authority = folder, settings, open_authority(folder, settings)
        TufRepository(folder.repository, folder.repository_keys).create(time.time())
        self.store: Store = folder.open_store()
        names = [f"sim-{number:05}" for number in range(devices)]
        self.members = enrol_simulated(self.store, self.authority, names, folder.path / "d", target=TARGET)
        self.managers: list[subprocess.Popen[bytes]] = []
        self._releases = 0

    def start_manager(self) -> None:
        words = ("--join", "--console-port", str(free_port()))
        self.managers.append(start_fleet(self.folder.path, *words))

    @contextlib.contextmanager
    def running(self, managers: int) -> Iterator[None]:
        authority = Authority(self.folder.identity)
        configuration = write_configuration(self.folder, self.settings, authority)
        behaviours = {member.device: FAST for member in self.members}
        try:
            with Mosquitto(configuration, self.settings, authority) as self.broker:
                for _ in range(managers):
                    self.start_manager()
                self.wait_for_balance()
                access = read_access(self.folder, self.settings)
                with SimulatedFleet(self.members, access, behaviours=behaviours) as self.devices:
                    self.devices.wait_until(lambda one: one.is_online and one.desired is not None, 60)
                    yield
        finally:
            for process in self.managers:
                process.send_signal(signal.SIGINT)
            for process in self.managers:
                process.wait(30)

    def wait_for_balance(self) -> float:
        """Wait until living managers hold all shards, in fair shares; returns the seconds."""
        begin_s, count = time.monotonic(), len(self.managers)
        while time.monotonic() - begin_s < 30:
            shares = self.read_shares()
            if (
                len(shares) == count
                and shares.total() == SHARDS
                and max(shares.values()) <= -(-SHARDS // count)
            ):
                return time.monotonic() - begin_s
            time.sleep(0.05)
        sys.exit(f"the managers hold {shares}\n{find_log(self.folder.path).read_text()[-3000:]}")

    def read_shares(self) -> Counter[str]:
        """Return holder -> number of shards that it holds, of managers that are there."""
        with self.store.snapshot() as session:
            statement = select(ShardRow.holder).join(ManagerRow, ManagerRow.holder == ShardRow.holder)
            return Counter(session.scalars(statement))

    def begin_rollout(self, waves: str = "100%", minimum: int | None = None) -> tuple[str, str]:
        """Start a rollout of a new release; returns its name and the version."""
        self._releases += 1
        version = f"{self._releases}.0.0"
        minimum = minimum or len(self.members)
        rollout = roll_out(self.store, version, size_bytes=100_000, waves=waves, minimum=minimum, soak_s=0.5)
        return rollout, version

    def wait_for_end(self, rollout: str) -> None:
        wait_for_end(self.store, rollout, 60.0)

    def count_wrong(self, version: str) -> dict[str, int]:
        """Return what is wrong after all rollouts have succeeded; all should be 0."""
        deadline_s = time.monotonic() + 25.0
        while (wrong := self._compare(version)) and time.monotonic() < deadline_s:
            time.sleep(0.5)  # the last reports are on their way
        with self.store.snapshot() as session:
            rollouts = list(session.scalars(select(AuditRow.subject).where(AuditRow.action == "rollout.log")))
            is_broken = audit.find_break(session) is not None
        names = set(rollouts)
        return {
            "wrong states": len(wrong),
            "waves twice": sum(self._count_repeated(name) for name in names),
            "decisions that differ": sum(len(replay_rollout(self.store, name)) for name in names),
            "broken audit log": int(is_broken),
        }

    def _compare(self, version: str) -> list[str]:
        """Return the devices whose state in the store differs from what they are."""
        with self.store.snapshot() as session:
            rows = session.execute(
                select(DeviceRow, DesiredRow.version).join(DesiredRow, DesiredRow.device == DeviceRow.name)
            ).all()
        return [
            row.name for row, sent in rows if not _is_true(row, sent, self.devices.devices[row.name], version)
        ]

    def _count_repeated(self, rollout: str) -> int:
        with self.store.snapshot() as session:
            entries = [entry for _, _, entry in read_entries(session, rollout)]
        started = Counter(
            device
            for entry in entries
            if isinstance(entry, Decision) and entry.action == "start"
            for device in entry.devices
        )
        return sum(count - 1 for count in started.values())

    def count_events(self, stated: Counter[str]) -> dict[str, int]:
        """Return how many events that devices stated are not in the audit log, or there twice."""
        deadline_s = time.monotonic() + ALARM_S
        while True:
            found, alarmed = self._read_events()
            missing = stated - found
            lost = Counter(text.split()[0] for text in missing.elements()) - alarmed
            if not lost or time.monotonic() > deadline_s:  # an alarm counts what was dropped in a minute
                break
            time.sleep(1.0)
        if missing:
            print(f"missing, as device and turn: {sorted(missing)[:40]}", flush=True)
        return {
            "events": stated.total(),
            "lost events": lost.total(),
            "dropped with an alarm, above ten a minute": missing.total() - lost.total(),
            "events twice": (found - stated).total(),
        }

    def _read_events(self) -> tuple[Counter[str], Counter[str]]:
        """Return the texts of events in the audit log, and device -> dropped events that alarms count."""
        alarmed: Counter[str] = Counter()
        with self.store.snapshot() as session:
            rows = session.scalars(select(AuditRow.detail).where(AuditRow.action == "device.event")).all()
            alarms = select(AuditRow.subject, AuditRow.detail).where(AuditRow.action == "alarm.events")
            for device, detail in session.execute(alarms):
                alarmed[device] += detail["dropped"]
        return Counter(row["text"] for row in rows), alarmed


def _is_true(row: DeviceRow, sent: int, device: SimulatedDevice, version: str) -> bool:
    models = {one["model"]: one["version"] for one in (row.reported or {}).get("models", ())}
    held = 0 if device.desired is None else device.desired.version
    return (
        models == device.versions == {MODEL: version}
        and row.desired_held == held == sent
        and (row.status, row.is_online) == ("converged", True)
    )


class Talk:
    """Events that devices state, each with a text of its own."""

    def __init__(self, site: Site) -> None:
        self.stated: Counter[str] = Counter()
        self._site, self._turn = site, 0
        self._names = sorted(site.devices.devices)

    def say(self) -> None:
        """Make the next 20 devices state an event; so each states few a minute."""
        self._turn += 1
        for each in range(20):
            name = self._names[(20 * self._turn + each) % len(self._names)]
            text = f"{name} {self._turn}"
            self.stated[text] += 1
            self._site.devices.send_event(text, [name])


def measure_restart(site: Site, server: PostgresqlServer, times: int, seed: int) -> dict[str, object]:
    """Stop or kill the database again and again."""
    draw, away = random.Random(seed), []  # noqa: S311
    with site.running(1):
        talk = Talk(site)
        rollout, version = site.begin_rollout()
        for number in range(times):
            talk.say()
            time.sleep(draw.uniform(0.2, 0.8))
            begin_s = time.monotonic()
            server.stop((signal.SIGINT, signal.SIGQUIT, signal.SIGKILL)[number % 3])
            talk.say()
            server.start()
            away.append(time.monotonic() - begin_s)
            if number % 5 == 4:
                site.wait_for_end(rollout)
                rollout, version = site.begin_rollout()
        site.wait_for_end(rollout)
        time.sleep(2.0)
        return {
            "restarts": times,
            "database away, median s": sorted(away)[len(away) // 2],
            "manager joined again": find_log(site.folder.path).read_text().count("joining again"),
            **site.count_events(talk.stated),
            **site.count_wrong(version),
        }


def measure_failover(site: Site, server: PostgresqlServer, copy: PostgresqlServer) -> dict[str, object]:
    """Kill the first server in mid-rollout, and promote its copy."""
    with site.running(1):
        talk = Talk(site)
        rollout, version = site.begin_rollout()
        talk.say()
        time.sleep(0.5)
        server.stop(signal.SIGKILL)
        killed_s = time.monotonic()
        talk.say()
        time.sleep(1.0)
        copy.promote()
        promoted_s = time.monotonic()
        talk.say()
        site.wait_for_end(rollout)
        found_s = time.monotonic()
        rollout, version = site.begin_rollout()
        site.wait_for_end(rollout)
        time.sleep(2.0)
        return {
            "promoted after, s": promoted_s - killed_s,
            "rollout ended after, s": found_s - killed_s,
            **site.count_events(talk.stated),
            **site.count_wrong(version),
        }


def measure_full(site: Site, server: PostgresqlServer, disk: Path) -> dict[str, object]:
    with site.running(1):
        talk = Talk(site)
        rollout, version = site.begin_rollout()
        site.wait_for_end(rollout)
        ballast = disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        rollout = ""
        refused = 0
        for _ in range(10):
            talk.say()
            try:
                if not rollout:
                    rollout, version = site.begin_rollout()
            except OutputError:
                refused += 1
            time.sleep(0.5)
        ballast.unlink()
        has_ended = server.restart_if_ended()  # it ends itself where it cannot write its log
        freed_s = time.monotonic()
        time.sleep(1.0)
        if not rollout:
            rollout, version = site.begin_rollout()
        site.wait_for_end(rollout)
        ended_s = time.monotonic()
        time.sleep(2.0)
        log = find_log(site.folder.path).read_text()
        return {
            "orders refused while full": refused,
            "server ended itself": has_ended,
            "errors of the manager": log.count("No space left") + log.count("could not"),
            "rollout ended after, s": ended_s - freed_s,
            **site.count_events(talk.stated),
            **site.count_wrong(version),
        }


def measure_kill(site: Site, times: int, seed: int) -> dict[str, object]:
    """Kill one of two managers in mid-rollout, again and again."""
    draw, takeovers = random.Random(seed), []  # noqa: S311
    with site.running(2):
        version = ""
        for number in range(times):
            rollout, version = site.begin_rollout("10%,50%,100%", minimum=max(len(site.members) // 10, 1))
            site.wait_for_balance()
            time.sleep(draw.uniform(0.0, 1.2))
            victim = site.managers.pop(draw.randrange(2))
            victim.kill()
            victim.wait()
            takeovers.append(site.wait_for_balance())
            site.start_manager()
            site.wait_for_end(rollout)
            site.devices.wait_until(lambda one, version=version: one.versions.get(MODEL) == version, 30)  # type: ignore[misc]
            print(f"{number + 1}: all shards taken after {takeovers[-1]:.2f} s", flush=True)
        return {
            "kills": times,
            "takeover, median s": sorted(takeovers)[len(takeovers) // 2],
            "takeover, longest s": max(takeovers),
            **site.count_wrong(version),
        }


def measure_scale(site: Site, server: PostgresqlServer, managers: int) -> dict[str, object]:
    """Roll two releases out; returns events a second and the processor time of each part."""
    with site.running(managers):
        pids = {"postgresql": server.pids(), "broker": [site.broker.pid], "devices": [os.getpid()]}
        pids["managers"] = [process.pid for process in site.managers]
        rollout, _ = site.begin_rollout()
        site.wait_for_end(rollout)
        reports = sum(one.counts.reports for one in site.devices.devices.values())
        before = {name: _read_cpu(each) for name, each in pids.items()}
        begin_s = time.monotonic()
        rollout, version = site.begin_rollout()
        site.devices.wait_until(lambda one: one.versions.get(MODEL) == version, 90)
        site.wait_for_end(rollout)
        seconds = time.monotonic() - begin_s
        events = sum(one.counts.reports for one in site.devices.devices.values()) - reports
        events += len(site.members)  # documents
        cpu = {name: _read_cpu(each) - before[name] for name, each in pids.items()}
        return {
            "managers": managers,
            "seconds": seconds,
            "events": events,
            "events a second": events / seconds,
            **{f"{name}, CPU s": spent for name, spent in cpu.items()},
            **{f"{name}, us an event": 1e6 * spent / events for name, spent in cpu.items()},
            "share of two cores": sum(cpu.values()) / seconds / 2,
        }


def _read_cpu(pids: list[int]) -> float:
    spent = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            spent += sum(map(int, fields[11:15]))  # with children that have ended
    return spent / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """Yield a folder on a disk of its own that is nearly full with a new database."""
    with tempfile.TemporaryDirectory(prefix="edgekit-full-") as name:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", name], check=True)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=False)


def run_part(options: argparse.Namespace, folder: FleetFolder) -> list[dict[str, object]]:
    count, times = options.devices, options.times
    with contextlib.ExitStack() as parts:
        if options.part == "full":
            disk = parts.enter_context(small_disk())
            (disk / "pg").mkdir()
            small = "max_wal_size = 48MB\nmin_wal_size = 32MB\nwal_recycle = off"
            server = parts.enter_context(PostgresqlServer(is_durable=True, place=disk / "pg", settings=small))
            url = parts.enter_context(new_database(server))
            return [measure_full(Site(folder, url, count), server, disk)]
        server = parts.enter_context(PostgresqlServer(is_durable=True))
        if options.part == "failover":
            copy = parts.enter_context(server.make_copy())
            url = server.url().replace("127.0.0.1:", f"127.0.0.1:{server.port},127.0.0.1:{copy.port}|")
            url = f"{url.split('|')[0]}/postgres?target_session_attrs=read-write"
            return [measure_failover(Site(folder, url, count), server, copy)]
        if options.part == "scale":
            rows = []
            for managers in (1, 2):
                with new_database(server) as url:
                    site = Site(FleetFolder(folder.path / str(managers)), url, count)
                    rows.append(measure_scale(site, server, managers))
                    site.store.close()
            return rows
        site = Site(folder, server.url(), count)
        if options.part == "kill":
            return [measure_kill(site, times, options.seed)]
        return [measure_restart(site, server, times, options.seed)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("part", choices=("restart", "failover", "full", "kill", "scale"))
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    allow_many_files(options.devices + 200)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    limit_time(LIMIT_S)
    with tempfile.TemporaryDirectory(prefix="edgekit-fleet-postgresql-") as place:
        rows = run_part(options, FleetFolder(Path(place) / "fleet"))
    for row in rows:
        for name, value in row.items():
            print(f"{name:30} {value:.2f}" if isinstance(value, float) else f"{name:30} {value}", flush=True)
        print()
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
