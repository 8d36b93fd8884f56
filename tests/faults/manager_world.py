"""A fleet without a network: the manager's real parts in this process, and devices that outlive it."""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, select, text
from tests.faults.disk_calls import DiskCalls
from tests.faults.manager_devices import BAD_VERSION, FaultsDevice

from edgekit_fleet.manager import control_loop
from edgekit_fleet.operations import running
from edgekit_fleet.operations.rollouts import replay_rollout
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.rollouts.progress import Decision, JoinEntry, StartEntry, WithdrawalEntry
from edgekit_fleet.rollouts.runner import OPEN_STATES, read_entries
from edgekit_fleet.store import audit, database
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.tables import (
    DesiredRow,
    DeviceRow,
    ExecutionRow,
    MemberRow,
    ReleasePackageRow,
    ReleaseRow,
    RolloutRow,
    WantedModelRow,
)
from edgekit_runtime.errors import EdgekitError, OutputError, UnavailableError
from edgekit_runtime.system.atomic_files import hash_file
from edgekit_runtime.trust.dsse import Verifier

DEVICES = {"d1": "x86-64", "d2": "x86-64", "d3": "rpi5", "d4": "rpi5"}
VERSIONS = ("1.0.0", "2.0.0", BAD_VERSION)
_SETTINGS = FleetSettings()
_TURNS = 60
_FAILED_TURNS = 3  # of a full disk, before there is space again


class _Nothing:
    """In place of broker and web server."""

    def __init__(self, *_: object) -> None: ...
    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_: object) -> None: ...
    def restart_if_ended(self) -> None: ...
    def reload(self) -> None: ...


class _Link:
    """The manager's link to the broker, which brings documents to devices at once."""

    is_connected = True

    def __init__(self, on_message: Callable[[str, bytes], None], *_: object) -> None:
        self._on_message = on_message
        self.devices: dict[str, FaultsDevice] = {}

    async def connect(self, *_: object) -> None: ...
    async def drain(self) -> None: ...
    async def close(self) -> None: ...
    def publish(self, device: str, kind: str, envelope: bytes, *, retain: bool) -> None:
        assert kind == "desired" and retain
        if device in self.devices:
            self.devices[device].receive(envelope)


_real_time, _real_engine, _real_prepare = time.time, database.create_engine, database._prepare_sqlite


class _Newest:
    """What the functions below use: the newest world of this process, and the engine of its store."""

    world: "World | None" = None
    engine: Engine | None = None


def _make_engine(url: URL, **options: Any) -> Engine:
    """Return the engine of the world's store, the same one for all worlds: it knows its statements."""
    assert _Newest.world is not None
    if url.database != str(_Newest.world.store_path):
        return _real_engine(url, **options)
    if _Newest.engine is None:

        def connect() -> sqlite3.Connection:
            assert _Newest.world is not None
            return sqlite3.connect(_Newest.world.store_path, check_same_thread=False)

        _Newest.engine = _real_engine(url, creator=connect, **options)
        _real_prepare(_Newest.engine)
    return _Newest.engine


async def _call(function: Callable[..., Any], *arguments: object) -> Any:
    return function(*arguments)


def prepare_process() -> None:
    """Let this process have no broker, no threads, no waits, and the clock and engine of its newest world."""
    time.time = lambda: _real_time() + (0.0 if _Newest.world is None else _Newest.world.read_offset())
    asyncio.to_thread = _call
    running.Mosquitto = running.serve_devices = _Nothing
    control_loop.BrokerLink = _Link
    database.create_engine = _make_engine
    database._prepare_sqlite = lambda engine: None if engine is _Newest.engine else _real_prepare(engine)
    for name in ("_DECIDE_S", "_UPKEEP_S", "_EXPIRY_S", "_UNANSWERED_S"):
        setattr(control_loop, name, 0.0)


class World:
    """A fleet in a folder, which may be copied while nobody runs it.

    Attributes:
        fleet, store_path: folder of the fleet, and its store.
        packages: version and target -> package.
        manager: the running manager, or None.
        calls: faults come from there.
    """

    def __init__(
        self,
        root: Path,
        packages: dict[tuple[str, str], Path],
        trust: Verifier,
        calls: DiskCalls | None = None,
    ) -> None:
        _Newest.world = self
        self.root, self.packages, self.trust, self.calls = root, packages, trust, calls
        self.fleet = FleetFolder(root / "disk" / "fleet")
        self.store_path = self.fleet.path / "fleet.db"
        self.site = root / "site"
        self.site.mkdir(parents=True, exist_ok=True)
        (root / "disk" / "backups").mkdir(parents=True, exist_ok=True)
        self.manager: running.RunningFleet | None = None
        self._parts = contextlib.ExitStack()
        self._events = asyncio.new_event_loop()
        self.devices = {name: self._open_device(name, target) for name, target in DEVICES.items()}

    def _open_device(self, name: str, target: str) -> FaultsDevice:
        return FaultsDevice(self.site, self.fleet.repository, name, target, self.trust)

    # The clock

    def read_offset(self) -> float:
        """Return how far the clock is ahead."""
        path = self.site / "clock"
        return float(path.read_text()) if path.exists() else 0.0

    def pass_time(self, seconds: float) -> None:
        """Let the clock go forward."""
        (self.site / "clock").write_text(str(self.read_offset() + seconds))

    # The manager

    def start(self) -> running.RunningFleet:
        """Start the manager, or another one beside it."""
        fleet = self._parts.enter_context(running.start(self.fleet, _SETTINGS))
        self._connect(fleet)
        self.manager = self.manager or fleet
        return fleet

    def _connect(self, fleet: running.RunningFleet) -> None:
        """Connect a manager to the broker, which brings what it has kept."""
        for name, device in self.devices.items():
            if device.is_enrolled:
                fleet.loop._link.devices[name] = device
            for where, payload in device.state.retained.items():
                fleet.loop.inbox.put(where, payload)

    def turn(self, fleet: running.RunningFleet | None = None) -> None:
        """Let the manager take what devices publish, and do its turn."""
        manager = fleet or self.manager
        assert manager is not None
        for name, device in self.devices.items():
            if device.is_enrolled and not device.state.is_revoked:
                manager.loop._link.devices[name] = device
                for where, payload in device.act(time.time()):
                    manager.loop.inbox.put(where, payload)
        self._events.run_until_complete(manager.loop.turn())

    def settle(self, is_done: Callable[["World"], bool] = lambda _: True) -> None:
        """Let the manager turn until nothing is left to be done.

        Raises:
            AssertionError: that takes too long.
        """
        failed = 0
        for _ in range(_TURNS):
            try:
                self.turn()
            except UnavailableError:  # it joins again, as in `ControlLoop.run`
                assert self.manager is not None
                self.manager.loop._join()
                self._connect(self.manager)
                continue
            except OutputError:
                failed += 1
                if failed > _FAILED_TURNS or self.calls is None:
                    raise
                if failed == _FAILED_TURNS:
                    self.calls.disarm()
                continue
            if is_done(self) and self.is_at_rest():
                return
        raise AssertionError(f"does not come to rest: {self.describe()}")

    def stop(self) -> None:
        """End the manager as an orderly stop does."""
        if self.manager is not None:
            with self.manager.store.transaction() as session:
                self.manager.loop.shards.leave(session)
        self.manager = None

    def close(self) -> None:
        """End what runs, as the end of the process does."""
        self._parts.close()
        self._events.close()

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        """Yield the open store, as a command does."""
        store = self.fleet.open_store()
        try:
            yield store
        finally:
            store.close()

    # What is true

    def read(self, statement: Any) -> list[Any]:
        """Return rows of the store of the manager that runs."""
        assert self.manager is not None
        with self.manager.store.transaction() as session:
            return list(session.execute(statement).all())

    def is_at_rest(self) -> bool:
        """Return whether each device holds the newest document, and no rollout has more to do now."""
        rows = self.read(
            select(DesiredRow.device, DesiredRow.version, DesiredRow.is_due, DeviceRow.desired_held)
            .join(DeviceRow, DeviceRow.name == DesiredRow.device)
            .where(DeviceRow.revoked_at.is_(None))
        )
        for device, version, is_due, held in rows:
            found = self.devices[device]
            own = 0 if found.desired is None else found.desired.version
            if found.is_enrolled and (is_due or not version == held == own):
                return False
        return not self.read(select(RolloutRow.name).where(RolloutRow.state.in_(OPEN_STATES))) or (
            not self.read(select(ExecutionRow.execution).where(ExecutionRow.ended_at.is_(None)))
            and self.manager is not None
            and not self.manager.loop._has_more
        )

    def rollout(self, name: str) -> tuple[str, int]:
        """Return state and number of the open wave, from 1; `none` where there is no such rollout."""
        rows = self.read(select(RolloutRow.state, RolloutRow.wave).where(RolloutRow.name == name))
        return (rows[0].state, rows[0].wave + 1) if rows else ("none", 0)

    def describe(self) -> str:
        """Return how far all is, for a message."""
        rollouts = self.read(select(RolloutRow.name, RolloutRow.state, RolloutRow.wave, RolloutRow.because))
        held = {n: (d.state.active[1], d.desired and d.desired.version) for n, d in self.devices.items()}
        desired = self.read(select(DesiredRow.device, DesiredRow.version, DesiredRow.is_due))
        return f"{[tuple(row) for row in rollouts]}, {held}, {[tuple(row) for row in desired]}"

    def find_problems(self) -> list[str]:
        """Return all that is wrong, while the manager runs and all is at rest."""
        assert self.manager is not None
        problems = []
        with contextlib.closing(sqlite3.connect(self.fleet.path / "fleet.db")) as connection:
            found = connection.execute("PRAGMA integrity_check").fetchall()
            if found != [("ok",)]:
                problems.append(f"the store is damaged: {found}")
        with self.manager.store.transaction() as session:
            if (number := audit.find_break(session)) is not None:
                problems.append(f"the audit log is broken at {number}")
        for (name,) in self.read(select(RolloutRow.name)):
            problems += self._check_rollout(name)
        problems += self._check_devices()
        problems += self._check_repository()
        return problems

    def list_released(self) -> dict[str, str]:
        """Return the digests of the files of all packages that were released, by those of their manifests."""
        with contextlib.closing(sqlite3.connect(self.store_path)) as connection:
            return dict(connection.execute("SELECT manifest_sha256, sha256 FROM release_packages"))

    def _check_rollout(self, name: str) -> list[str]:
        assert self.manager is not None
        problems = [f"{name}: decided otherwise: {one}" for one in replay_rollout(self.manager.store, name)]
        with self.manager.store.transaction() as session:
            entries = [entry for _, _, entry in read_entries(session, name)]
        cohort: list[str] = []
        offered: list[str] = []
        waves = []
        for number, entry in enumerate(entries):
            if isinstance(entry, StartEntry) and number:
                problems.append(f"{name}: started twice")
            if isinstance(entry, (StartEntry, JoinEntry)):
                cohort += entry.devices
            elif isinstance(entry, WithdrawalEntry):
                offered = [one for one in offered if one not in entry.devices]
            elif isinstance(entry, Decision) and entry.action == "start":
                offered += entry.devices
                waves.append(entry.wave)
        if waves != sorted(waves) or set(waves) != set(range(len(set(waves)))):
            problems.append(f"{name}: waves {waves}")
        if len(set(offered)) != len(offered) or not set(offered) <= set(cohort):
            problems.append(f"{name}: offered {offered} of {cohort}")
        members = self.read(select(MemberRow.device, MemberRow.attempts).where(MemberRow.rollout == name))
        for device, attempts in members:
            rows = self.read(
                select(ExecutionRow.execution).where(
                    ExecutionRow.rollout == name, ExecutionRow.device == device
                )
            )
            if len(rows) > attempts:
                problems.append(f"{name}: {device} has {len(rows)} executions of {attempts} attempts")
        return problems

    def _check_devices(self) -> list[str]:
        problems, released = [], self.list_released()
        known = {
            row.name: row for row in self.read(select(DeviceRow.name, DeviceRow.revoked_at, DeviceRow.status))
        }
        wanted = {
            row.device: row.document
            for row in self.read(select(WantedModelRow.device, WantedModelRow.document))
        }
        for name, device in self.devices.items():
            problems += device.find_problems(released)
            if device.is_enrolled and not device.state.is_revoked and name not in known:
                problems.append(f"{name} has a certificate, and the store does not know it")
            document = wanted.get(name)
            if not document or name not in known or known[name].revoked_at is not None:
                continue
            is_there = device.state.active[2] == document["manifest_sha256"]
            if not is_there and document["version"] != BAD_VERSION:
                problems.append(f"{name}: runs {device.state.active[1]}, wanted is {document['version']}")
            if device.desired is not None and [one.execution for one in device.desired.models] != [
                document["execution"]
            ]:
                problems.append(f"{name}: holds another document than the store wants")
        return problems

    def _check_repository(self) -> list[str]:
        """Return what is wrong with releases: each must be whole, and offered as it was released."""
        counts = self.read(text("SELECT release, count(*) FROM release_packages GROUP BY release"))
        problems = [f"release {name} has {count} packages" for name, count in counts if count != 2]
        rows = self.read(
            select(ReleasePackageRow.path, ReleasePackageRow.sha256, ReleasePackageRow.deltas)
            .join(ReleaseRow, ReleaseRow.name == ReleasePackageRow.release)
            .where(ReleaseRow.withdrawn_at.is_(None))
        )
        released = {path: sha256 for path, sha256, _ in rows}
        released |= {delta["path"]: delta["sha256"] for _, _, deltas in rows for delta in deltas}
        offered = TufRepository(self.fleet.repository, self.fleet.repository_keys).list_targets()
        for path, sha256 in released.items():
            folder, _, name = path.rpartition("/")
            file = self.fleet.repository / "targets" / folder / f"{sha256}.{name}"
            if path not in offered or offered[path].sha256 != sha256 or hash_file(file) != sha256:
                problems.append(f"{path}: is not offered as it was released")
        # A device verifies all of this; one path of a class leads it through all metadata.
        for target, path in {path.partition("/")[0]: path for path in released}.items():
            device = next(
                (one for one in self.devices.values() if one.target == target and one.is_enrolled), None
            )
            try:
                if device is not None and device.look_up(path, time.time()) is None:
                    problems.append(f"{path}: a device does not find it")
            except EdgekitError as error:
                problems.append(f"the repository is refused: {error}")
        return problems
