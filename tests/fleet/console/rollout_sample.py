"""Writes a simulated rollout into a store, with its log, members and executions, as the manager would."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tests.fleet.simulated_rollout import NOW, Model, Simulation, simulate

from edgekit_fleet.rollouts.outside_gates import OutsideGate
from edgekit_fleet.rollouts.progress import AnswerEntry, Decision, Entry, StartEntry
from edgekit_fleet.rollouts.runner import log_entries
from edgekit_fleet.store.database import Store, insert_many
from edgekit_fleet.store.tables import (
    DeviceRow,
    ExecutionRow,
    MemberRow,
    ReleasePackageRow,
    ReleaseRow,
    RolloutRow,
    shard_of,
)
from edgekit_runtime.dataclass_json import to_plain

_STATES = {"returning": "returned", "pending": "waiting", "started": "offered"}
_WORDS = {
    "self-test": "the self-test gives other answers than on the host",
    "timeout": "did not end within 172800 s; was downloading: the link was away for 60 s",
}


def add_rollout(
    store: Store,
    name: str,
    model: Model,
    *,
    devices: int = 200,
    seed: int = 3,
    at: float = NOW,
    days: float = 3,
    evidence: Mapping[str, OutsideGate] | None = None,
) -> Simulation:
    """Roll a model out to devices that are added, and write down all that happened; `at` is its start."""
    run = simulate(seed, devices, model, days=days)
    begin_at, start = run.log[0]
    assert isinstance(start, StartEntry)
    run.log[0] = begin_at, replace(start, settings=replace(start.settings, evidence=evidence or {}))
    progress = run.progress
    because = progress.last.sentence if progress.last else ""
    with store.transaction() as session:
        session.add(ReleaseRow(name=f"{name}-release", created_at=at, created_by="ci", note="simulated"))
        session.flush()
        for target in sorted({member.device_class for member in progress.members.values()}):
            session.add(_make_package(f"{name}-release", target))
        session.add(
            RolloutRow(
                name=name,
                release=f"{name}-release",
                selector="site in (lyon, nice)",
                state=progress.state,
                because=because,
                settings=to_plain(progress.settings),
                wave=progress.wave,
                created_at=at,
                created_by="maria",
                started_at=at,
                ended_at=at + run.ended_at if progress.state in ("aborted", "succeeded") else None,
            )
        )
        session.flush()
        insert_many(session, DeviceRow, [_make_device(name, each, at) for each in progress.members])
        insert_many(session, MemberRow, list(_make_members(name, run, at)))
        insert_many(session, ExecutionRow, list(_make_executions(name, run, at)))
        for logged_at, entries in _batch(run.log):
            actor = "maria" if logged_at == NOW else "manager"
            log_entries(session, name, actor, [_rename(name, one) for one in entries], at + logged_at - NOW)
    return run


def device_name(rollout: str, device: str) -> str:
    return f"{rollout}-{device}"


def _rename(rollout: str, entry: Entry) -> Entry:
    if isinstance(entry, AnswerEntry):
        return replace(entry, device=device_name(rollout, entry.device))
    devices = getattr(entry, "devices", ())
    return replace(entry, devices=tuple(device_name(rollout, one) for one in devices)) if devices else entry  # type: ignore[call-arg]


def _batch(log: list[tuple[float, Entry]]) -> Iterator[tuple[float, list[Entry]]]:
    """Yield what was logged at the same time together."""
    held: list[Entry] = []
    for number, (at, entry) in enumerate(log):
        held.append(entry)
        if number + 1 == len(log) or log[number + 1][0] != at or isinstance(entry, Decision):
            yield at, held
            held = []


def _make_package(release: str, target: str) -> ReleasePackageRow:
    return ReleasePackageRow(
        release=release,
        model="digits",
        target=target,
        version="2",
        manifest_sha256="2" * 64,
        path=f"{target}/digits-2-{target}.edgepkg",
        size_bytes=4_200_000,
        sha256="ab" * 32,
        needs={
            "engines": ["onnxruntime"],
            "score": {
                "metric": "accuracy",
                "value": 0.971,
                "source_value": 0.975,
                "samples": 2000,
                "samples_kind": "data",
            },
        },
        deltas=[
            {"from_sha256": "1" * 64, "size_bytes": 310_000, "path": "d", "sha256": "cd" * 32},
            {"from_sha256": "", "size_bytes": 1_900_000, "path": "c", "sha256": "ef" * 32},
        ],
    )


def _make_device(rollout: str, device: str, at: float) -> dict[str, Any]:
    return {
        "name": device_name(rollout, device),
        "shard": shard_of(device_name(rollout, device)),
        "target": "rpi5",
        "tags": {"site": "lyon"},
        "public_key": b"",
        "certificate_serial": "1",
        "certificate_expires_at": at + 300 * 86_400.0,
        "enrolled_at": at,
        "facts": {},
        "reported": None,
        "status": "converged",
        "because": "",
        "desired_held": 0,
        "sequence": 0,
        "hello_sequence": 0,
        "event_sequence": 0,
        "is_online": True,
        "last_seen_at": at,
        "pinned": {},
        "streams": {},
        "decryption_key": "",
        "settings": {},
        "logs": {},
    }


def _make_members(rollout: str, run: Simulation, at: float) -> Iterator[dict[str, Any]]:
    ends = run.progress.settings.waves
    for rank, (device, member) in enumerate(run.progress.members.items()):
        yield {
            "rollout": rollout,
            "device": device_name(rollout, device),
            "wave": next(number for number, end in enumerate(ends) if rank < end),
            "state": _STATES.get(member.state, member.state),
            "because": member.code,
            "attempts": member.attempts,
            "before": {},
            "offered_at": at + member.started_at - NOW if member.attempts else None,
            "answered_at": at + member.answered_at - NOW if member.answered_at else None,
        }


def _make_executions(rollout: str, run: Simulation, at: float) -> Iterator[dict[str, Any]]:
    number = 0
    for logged_at, entry in run.log:
        if isinstance(entry, AnswerEntry) and entry.outcome is not None:
            number += 1
            yield {
                "execution": f"{rollout}.{number}",
                "rollout": rollout,
                "device": device_name(rollout, entry.device),
                "model": "digits",
                "version": "2",
                "state": entry.outcome,
                "reason": _WORDS.get(entry.code, ""),
                "code": entry.code,
                "done_bytes": 0,
                "sent_bytes": 0,
                "created_at": at,
                "changed_at": at + logged_at - NOW,
                "ended_at": at + logged_at - NOW,
            }
