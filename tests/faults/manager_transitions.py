"""Every transition of the manager: what it does, and what must be true when it is over."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from cryptography import x509
from sqlalchemy import func, select
from tests.faults.manager_world import DEVICES, World

from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.operations import devices, records, releases, rollouts
from edgekit_fleet.operations.rollouts import StartRollout
from edgekit_fleet.rollouts.progress import Order, OrderEntry
from edgekit_fleet.rollouts.runner import read_entries
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.shards import check_free
from edgekit_fleet.store.tables import AuditRow, DeviceRow, ReleaseRow
from edgekit_fleet.web.app import EnrolmentPages
from edgekit_runtime.agent.documents import Enrolment, EnrolmentCode, RenewalRequest
from edgekit_runtime.errors import EdgekitError, FleetError, UnavailableError

Act = Callable[[World], object]


def _nothing(world: World) -> None:
    del world


@dataclass(frozen=True)
class Transition:
    """One transition.

    Attributes:
        name: for the table.
        act: what is interrupted; done again after that, unless it is over.
        is_over: whether its effect is there, once the manager runs.
        prepare: done before without a fault.
        after: done once all is at rest, before the next transition.
    """

    name: str
    act: Act
    is_over: Callable[[World], bool] = lambda _: True
    prepare: Act = _nothing
    after: Act | None = None


def _run(world: World) -> None:
    """Start the manager, and let it come to rest before the fault."""
    world.start()
    world.settle()


# Enrolment


def _pages(world: World, store: Store) -> EnrolmentPages:
    return EnrolmentPages(store, world.fleet, FleetSettings(), Authority(world.fleet.identity))


def _take(world: World, name: str, answer: Enrolment) -> None:
    state = world.devices[name].state
    certificate = x509.load_pem_x509_certificate(answer.certificate.encode())
    authority = x509.load_pem_x509_certificate(answer.authority.encode())
    certificate.verify_directly_issued_by(authority)
    state.serials.append(f"{certificate.serial_number:x}")
    state.root = answer.tuf_root
    world.devices[name].save()
    world.devices[name].greet()


def _enrol(name: str) -> Act:
    def act(world: World) -> None:
        with world.store() as store:
            state = world.devices[name].state
            if not state.code:
                authority, settings = Authority(world.fleet.identity), world.fleet.read_settings()
                (made,) = devices.invite(
                    store, settings, authority, (name,), actor="ann", target=DEVICES[name]
                )
                state.code = EnrolmentCode.parse(made.code).secret
                world.devices[name].save()
            _take(world, name, _pages(world, store)._enrol(world.devices[name].request()))

    return act


def _has_enrolled(*names: str) -> Callable[[World], bool]:
    def is_over(world: World) -> bool:
        rows = world.read(select(DeviceRow.name, DeviceRow.certificate_serial, DeviceRow.status))
        serials = {row.name: row.certificate_serial for row in rows}
        return all(world.devices[name].state.serials[-1:] == [serials.get(name)] for name in names)

    return is_over


def _enrol_rest(world: World) -> None:
    for name in ("d2", "d3"):
        _enrol(name)(world)


def _renew(world: World) -> None:
    device = world.devices["d1"]
    with world.store() as store:
        request = device.request()
        _take(world, "d1", _pages(world, store)._renew(RenewalRequest(device="d1", csr=request.csr)))


# Releases


def _release(version: str) -> Act:
    def act(world: World) -> None:
        paths = [path for (found, _), path in world.packages.items() if found == version]
        with world.store() as store:
            releases.make_release(world.fleet, store, world.trust, paths, actor="ann", name=f"R{version}")

    return act


def _has_release(version: str, *, is_withdrawn: bool = False) -> Callable[[World], bool]:
    def is_over(world: World) -> bool:
        rows = world.read(select(ReleaseRow.withdrawn_at).where(ReleaseRow.name == f"R{version}"))
        return bool(rows) and (rows[0].withdrawn_at is not None) == is_withdrawn

    return is_over


def _withdraw(world: World) -> None:
    with world.store() as store:
        releases.withdraw_release(world.fleet, store, "R3.0.0", "ann")


def _has_withdrawn(world: World) -> bool:
    path = next(p for (v, _), p in world.packages.items() if v == "3.0.0")
    device = world.devices["d1"]
    return (
        _has_release("3.0.0", is_withdrawn=True)(world)
        and device.look_up(f"x86-64/{path.name}", time.time()) is None
    )


def _rotate(world: World) -> None:
    roles = ("timestamp", "snapshot", "targets", "class-x86-64", "root", "manager")
    with world.store() as store:
        releases.rotate_keys(world.fleet, store, roles, actor="ann")


def _has_rotated(world: World) -> bool:
    return bool(world.read(select(AuditRow.number).where(AuditRow.action == "keys.rotate")))


# Rollouts


def _plan(name: str, version: str, **options: object) -> Act:
    def act(world: World) -> None:
        request = StartRollout(
            release=f"R{version}",
            selector="all",
            waves="1,2,100%",
            minimum=1,
            name=name,
            **{"soak_s": 0.0, **options},
        )
        with world.store() as store:
            rollouts.start_rollout(store, request, "ann")

    return act


def _exists(name: str) -> Callable[[World], bool]:
    return lambda world: world.rollout(name)[0] != "none"


def _run_rollout(name: str, version: str, *states: str) -> Act:
    def act(world: World) -> None:
        if not _exists(name)(world):
            _plan(name, version)(world)
        world.settle(lambda world: world.rollout(name)[0] in states)

    return act


def _order(name: str, order: Order, state: str, wave: int = 0) -> tuple[Act, Callable[[World], bool]]:
    """Return what gives an order once and lets the manager carry it out, and whether that is over."""

    def is_over(world: World) -> bool:
        found, open_wave = world.rollout(name)
        return found == state and open_wave >= wave

    def act(world: World) -> None:
        assert world.manager is not None
        with world.manager.store.transaction() as session:
            entries = [entry for _, _, entry in read_entries(session, name)]
        given = sum(isinstance(entry, OrderEntry) and entry.order == order for entry in entries)
        if given < max(wave, 1):
            rollouts.give_order(world.manager.store, name, order, "ann")
        world.settle(is_over)

    return act, is_over


# Administration


def _revoke(world: World) -> None:
    assert world.manager is not None
    world.devices["d3"].state.is_revoked = True
    world.devices["d3"].save()
    with suppress(FleetError):  # it is revoked already
        devices.revoke(world.manager.store, "d3", "ann", "stolen")
    world.settle()


def _has_revoked(world: World) -> bool:
    crl = x509.load_pem_x509_crl(Authority(world.fleet.identity).crl.read_bytes())
    revoked = {f"{one.serial_number:x}" for one in crl}
    return set(world.devices["d3"].state.serials) <= revoked


def _grow_stale(world: World) -> None:
    _run(world)
    world.pass_time(60.0)


def _take_over(world: World) -> None:
    assert world.manager is not None
    first, world.manager = world.manager, None
    world.start()
    with suppress(UnavailableError):
        world.turn(first)
        raise AssertionError("a manager without its lease goes on")
    world.settle()


def _back_up(world: World) -> None:
    folder = world.root / "disk" / "backups"
    for number in range(10):  # a user who is refused takes another name
        path = folder / f"{number}.backup"
        if not path.exists():
            records.back_up(world.fleet, path)
            return


def _find_backup(world: World) -> list[int]:
    """Return how many entries of the audit log each backup holds; a damaged one must be refused."""
    found = []
    for number, path in enumerate(sorted((world.root / "disk" / "backups").glob("*.backup"))):
        folder = FleetFolder(world.root / f"restored-{time.monotonic_ns()}-{number}")
        with suppress(EdgekitError):
            records.restore(folder, path)
            store = folder.open_store()
            with store.transaction() as session:
                found.append(session.scalar(select(func.count()).select_from(AuditRow)) or 0)
            store.close()
    return found


def _has_backup(world: World) -> bool:
    return any(count > 10 for count in _find_backup(world))


def _restore(world: World) -> None:
    folder = FleetFolder(world.root / "disk" / "restored")
    (path, *_) = sorted((world.root / "disk" / "backups").glob("*.backup"))
    records.restore(folder, path)


def _has_restored(world: World) -> bool:
    """Return whether the restored fleet is whole; half of one must not be there."""
    folder = FleetFolder(world.root / "disk" / "restored")
    if not folder.has_settings:
        assert not folder.path.exists() or not any(folder.path.iterdir()), "half of a fleet was restored"
        return False
    store = folder.open_store()
    with store.transaction() as session:
        check_free(session, time.time())
        rows = session.scalars(select(AuditRow.action).order_by(AuditRow.number.desc()).limit(1)).all()
    store.close()
    before = {path.name for path in (world.fleet.repository / "targets").rglob("*") if path.is_file()}
    after = {path.name for path in (folder.repository / "targets").rglob("*") if path.is_file()}
    Authority(folder.identity)
    return rows == ["fleet.restore"] and before == after


def _let_expire(world: World) -> None:
    world.pass_time(5 * 86_400.0)
    world.start()


def _has_renewed(world: World) -> bool:
    held = [
        device.desired
        for device in world.devices.values()
        if device.is_enrolled and not device.state.is_revoked
    ]
    return all(one is not None and one.expires_at - time.time() > 3 * 86_400.0 for one in held)


TRANSITIONS = (
    Transition("first start", World.start),
    Transition("enrolment", _enrol("d1"), _has_enrolled("d1"), after=_enrol_rest),
    Transition("first release", _release("1.0.0"), _has_release("1.0.0")),
    Transition("rollout start", _plan("r1", "1.0.0", approval="each"), _exists("r1")),
    Transition("wave 1", *_order("r1", "approve", "running", 1), prepare=_run),
    Transition("wave 2", *_order("r1", "approve", "running", 2), prepare=_run),
    Transition("wave 3 and end", *_order("r1", "approve", "succeeded", 3), prepare=_run),
    Transition("release with deltas", _release("2.0.0"), _has_release("2.0.0")),
    Transition("rollout with deltas", _run_rollout("r2", "2.0.0", "succeeded"), prepare=_run),
    Transition("rollback by order", *_order("r2", "abort", "aborted"), prepare=_run),
    Transition("bad release", _release("3.0.0"), _has_release("3.0.0")),
    Transition("bad release stops itself", _run_rollout("r3", "3.0.0", "aborted"), prepare=_run),
    Transition("release withdrawn", _withdraw, _has_withdrawn),
    Transition("certificate renewed", _renew, _has_enrolled("d1")),
    Transition("another device", _enrol("d4"), _has_enrolled("d4")),
    Transition("device revoked", _revoke, _has_revoked, prepare=_run),
    Transition("keys exchanged", _rotate, _has_rotated),
    Transition("documents renewed", World.settle, _has_renewed, prepare=_let_expire),
    Transition("lease taken over", _take_over, prepare=_grow_stale),
    Transition("backup while it runs", _back_up, _has_backup, prepare=_run),
    Transition("backup restored", _restore, _has_restored),
    Transition("last rollout", _run_rollout("r4", "2.0.0", "succeeded"), prepare=_run),
    Transition("orderly stop", World.stop, prepare=_run),
)
