"""A store as it looks after months of work, made in seconds: for tests and benchmarks of the console.

The same seed gives the same fleet. Nothing here is enrolled: keys and certificates are empty.
"""

import math
import random
import time
from collections.abc import Iterator
from typing import Any, Final

from edgekit_fleet.store import audit
from edgekit_fleet.store.attributes import list_models, list_stable, make_rows
from edgekit_fleet.store.database import Store, insert_many
from edgekit_fleet.store.tables import (
    AttributeRow,
    DesiredRow,
    DeviceRow,
    ExecutionRow,
    FigureRow,
    ManagerRow,
    ReleasePackageRow,
    ReleaseRow,
    WantedModelRow,
    shard_of,
)
from edgekit_runtime.agent.documents import DesiredModel, ModelFigures, Reported, ReportedModel
from edgekit_runtime.dataclass_json import to_plain

TARGETS: Final = ("jetson-orin-nano", "rpi5", "x86-64")
SITES: Final = ("ghent", "lyon", "nice", "paris", "porto", "turin")
RELEASES: Final = {
    "2026-09-14.1": (("detector", "1.3.0"), ("keywords", "0.9.2")),
    "2026-10-19.1": (("detector", "1.4.0"),),
    "2026-11-16.1": (("detector", "1.5.0"), ("keywords", "1.0.0")),
}
_STATUS: Final = {
    "converged": 955,
    "working": 15,
    "diverged": 8,
    "stale": 5,
    "faulty": 5,
    "new": 8,
    "revoked": 4,
}
_BECAUSE: Final = {
    "diverged": (
        ("disk-full", "2.1 GB are needed and 1.4 GB are free; free some space or raise the limit"),
        ("self-test", "the self-test of detector 1.5.0 gives other answers than on the host"),
        ("pinned", "detector is pinned to 1.4.0 on the device"),
    ),
    "stale": (("", "the desired document has expired, and no newer one has come"),),
    "faulty": (("not-finite", "detector 1.5.0 answers NaN to finite inputs"),),
}
_BATCH: Final = 5000
_DAY_S: Final = 86_400.0


def fill_store(
    store: Store, devices: int = 200, *, online: int | None = None, hours: int = 2, seed: int = 1
) -> None:
    """Fill an empty store.

    Args:
        store: store of a fleet without devices.
        devices: how many.
        online: number of connected devices; 94 of 100 by default.
        hours: number of hours with figures.
        seed: seed of the random draws.
    """
    draw, now = random.Random(seed), time.time()
    _add_releases(store, now)
    share = 0.94 if online is None else online / max(devices, 1)
    rows = _make_devices(draw, devices, share, now)
    for begin in range(0, devices, _BATCH):
        batch = [row for _, row in zip(range(begin, min(begin + _BATCH, devices)), rows, strict=False)]
        with store.transaction() as session:
            insert_many(session, DeviceRow, batch)
            stable = [(row, list_stable(row["facts"], list_models(row["reported"]))) for row in batch]
            insert_many(
                session,
                AttributeRow,
                [one for row, own in stable for one in make_rows(row["name"], own, row["tags"])],
            )
            wanted = [one for row in batch for one in _make_wanted(row)]
            insert_many(session, WantedModelRow, wanted)
            insert_many(session, DesiredRow, [_make_desired(row, now) for row in batch])
            insert_many(
                session, FigureRow, [one for row in batch for one in _make_figures(draw, row, now, hours)]
            )
            executions = [
                one for row in batch if row["status"] != "new" for one in _make_executions(row, now)
            ]
            insert_many(session, ExecutionRow, executions)
    with store.transaction() as session:
        session.add(ManagerRow(number=0, holder="m1:1:0", heartbeat_at=now + _DAY_S, turned_at=now))
        _add_history(session, now)


def _add_releases(store: Store, now: float) -> None:
    with store.transaction() as session:
        for age, (name, models) in enumerate(reversed(RELEASES.items())):
            at = now - (7 + 28 * age) * _DAY_S
            session.add(
                ReleaseRow(
                    name=name,
                    created_at=at,
                    created_by="ci",
                    note="nightly build" if age else "retrained on October's labels",
                )
            )
            session.flush()
            for model, version in models:
                for target in TARGETS:
                    session.add(_make_package(name, model, version, target))


def _make_package(release: str, model: str, version: str, target: str) -> ReleasePackageRow:
    return ReleasePackageRow(
        release=release,
        model=model,
        target=target,
        version=version,
        manifest_sha256=_digest(model, version, target),
        path=f"{target}/{model}-{version}-{target}.edgepkg",
        size_bytes=18_400_000 if model == "detector" else 1_900_000,
        sha256=_digest(target, version, model),
        needs={"engines": ["onnxruntime"], "memory_bytes": 400_000_000, "min_agreement": 0.97},
    )


def _digest(*parts: str) -> str:
    return random.Random("/".join(parts)).randbytes(32).hex()


def _make_devices(draw: random.Random, count: int, online: float, now: float) -> Iterator[dict[str, Any]]:
    statuses = draw.choices(tuple(_STATUS), tuple(_STATUS.values()), k=count)
    for number, status in enumerate(statuses):
        site, target = draw.choice(SITES), draw.choices(TARGETS, (5, 4, 1))[0]
        name = f"{site}-{number:05}"
        is_new = status == "new"
        is_online = not is_new and status not in ("revoked", "stale") and draw.random() < online
        models = () if is_new else _make_models(draw, target, status)
        because = draw.choice(_BECAUSE[status]) if status in _BECAUSE else ("", "")
        seen_at = None if is_new else now - draw.uniform(1, 600) * (1 if is_online else 900)
        facts = {
            "target": target,
            "runtime": "0.1.0" if draw.random() < 0.9 else "0.0.9",
            "engines": "onnxruntime,tensorrt" if target.startswith("jetson") else "onnxruntime",
            "memory_bytes": str({"jetson-orin-nano": 8, "rpi5": 4, "x86-64": 16}[target] << 30),
            "free_bytes": str(draw.randrange(10**9, 3 * 10**10)),
            "boot": f"{draw.getrandbits(64):016x}",
            "clock": f"{now:.0f}",
        }
        report = Reported(
            device=name,
            sequence=9,
            desired_version=3,
            status=status if status in ("working", "diverged", "stale") else "converged",  # type: ignore[arg-type]
            because="" if status == "faulty" else because[1],
            models=models,
            facts=facts,
        )
        yield {
            "name": name,
            "shard": shard_of(name),
            "target": target,
            "tags": {"site": site, "line": f"l{number % 7}", **({"beta": "yes"} if number % 40 == 7 else {})},
            "public_key": b"",
            "certificate_serial": f"{draw.getrandbits(64):x}",
            "certificate_expires_at": now + draw.uniform(20, 365) * _DAY_S,
            "enrolled_at": now - draw.uniform(30, 300) * _DAY_S,
            "revoked_at": now - 3 * _DAY_S if status == "revoked" else None,
            "status": status,
            "because": because[1],
            "facts": facts,
            "reported": None if is_new else to_plain(report),
            "desired_held": 0 if is_new else 3,
            "sequence": 0 if is_new else 9,
            "hello_sequence": 0 if is_new else 8,
            "event_sequence": 0,
            "is_online": is_online,
            "last_seen_at": seen_at,
            "pinned": {"detector": "1.4.0"} if because[0] == "pinned" else {},
            "streams": {},
            "decryption_key": "",
            "settings": {},
            "logs": {},
        }


def _make_models(draw: random.Random, target: str, status: str) -> tuple[ReportedModel, ...]:
    is_behind = status in ("diverged", "stale", "working") or draw.random() < 0.08
    found = []
    for model, version, older in (("detector", "1.5.0", "1.4.0"), ("keywords", "1.0.0", "0.9.2")):
        if model == "keywords" and target == "x86-64":
            continue
        runs = older if is_behind else version
        is_faulty = status == "faulty" and model == "detector"
        found.append(
            ReportedModel(
                model=model,
                version=runs,
                manifest_sha256=_digest(model, runs, target),
                health="faulty" if is_faulty else "healthy",
                previous=older if runs == version else "",
                because=_BECAUSE["faulty"][0][1] if is_faulty else "",
            )
        )
    return tuple(found)


def _make_wanted(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for model in (row["reported"] or {}).get("models", ()):
        is_open = row["status"] in ("diverged", "stale", "working")
        version = {"detector": "1.5.0", "keywords": "1.0.0"}[model["model"]] if is_open else model["version"]
        document = DesiredModel(
            model=model["model"],
            version=version,
            manifest_sha256=_digest(model["model"], version, row["target"]),
            path=f"{row['target']}/{model['model']}-{version}-{row['target']}.edgepkg",
            size_bytes=18_400_000,
            sha256=_digest(row["target"], version, model["model"]),
            execution=f"{row['name']}-{model['model']}-{version}",
            release="2026-11-16.1",
            rollout="",
        )
        yield {
            "device": row["name"],
            "model": model["model"],
            "rollout": None,
            "document": to_plain(document),
            "is_removed": False,
        }


def _make_desired(row: dict[str, Any], now: float) -> dict[str, Any]:
    return {
        "device": row["name"],
        "version": 3,
        "content_sha256": "",
        "envelope": b"",
        "key_id": "",
        "issued_at": now - _DAY_S,
        "expires_at": now + 6 * _DAY_S,
        "is_due": False,
    }


def _make_figures(
    draw: random.Random, row: dict[str, Any], now: float, hours: int
) -> Iterator[dict[str, Any]]:
    for model in (row["reported"] or {}).get("models", ()):
        slow = 1.15 if model["version"] == "1.5.0" else 1.0
        typical_ms = {"jetson-orin-nano": 9.0, "rpi5": 48.0, "x86-64": 14.0}[row["target"]] * slow
        p50_ms = typical_ms * draw.lognormvariate(0, 0.15)
        p99_ms = 3 * typical_ms * draw.lognormvariate(0, 0.2)
        figures = ModelFigures(
            model=model["model"],
            version=model["version"],
            requests=draw.randrange(100, 40_000),
            failed=draw.choice((0, 0, 0, 1, 3)),
            energy_mj=40 * draw.lognormvariate(0, 0.2) if row["target"].startswith("jetson") else None,
            agreement=min(1.0, draw.gauss(0.984, 0.006)) if model["version"] == "1.5.0" else None,
            compared=400 if model["version"] == "1.5.0" else 0,
            drift=abs(draw.gauss(0.05, 0.04)),
        )
        plain = to_plain(figures)
        for ago in range(hours) if row["is_online"] else (30,):
            load = 1 + 0.1 * math.sin(ago * math.tau / 24) + draw.gauss(0, 0.02)  # days are busier
            yield {
                "device": row["name"],
                "model": model["model"],
                "version": model["version"],
                "hour": int(now // 3600) - ago,
                "figures": {**plain, "p50_ms": p50_ms * load, "p99_ms": p99_ms * load},
                "reported_at": row["last_seen_at"],
            }


def _make_executions(row: dict[str, Any], now: float) -> Iterator[dict[str, Any]]:
    is_open = row["status"] == "working"
    failure = next((one for one in _BECAUSE["diverged"] if one[1] == row["because"]), None)
    for model in row["reported"]["models"]:
        version = {"detector": "1.5.0", "keywords": "1.0.0"}[model["model"]]
        state = "downloading" if is_open else "failed" if failure else "succeeded"
        began = now - (300 if is_open else 6.5 * _DAY_S)
        yield {
            "execution": f"{row['name']}-{model['model']}-{version}",
            "rollout": None,
            "device": row["name"],
            "model": model["model"],
            "version": version,
            "state": state,
            "reason": failure[1] if failure else "",
            "code": failure[0] if failure else "",
            "done_bytes": 7_400_000 if is_open else 18_400_000,
            "sent_bytes": 7_500_000 if is_open else 18_500_000,
            "created_at": began,
            "changed_at": now - 20 if is_open else began + 400,
            "ended_at": None if is_open else began + 400,
        }


def _add_history(session: Any, now: float) -> None:
    """Write audit entries of releases and of some devices, in the order of their times."""
    entries: list[tuple[float, str, audit.AuditEntry]] = []
    for row in session.query(ReleaseRow):
        made = audit.AuditEntry(action="release.make", subject=row.name, detail={"note": row.note})
        entries.append((row.created_at, "ci", made))
    for number, row in enumerate(session.query(DeviceRow).order_by(DeviceRow.name).limit(300)):
        detail = {"serial": row.certificate_serial, "target": row.target}
        entry = audit.AuditEntry(action="device.enrol", subject=row.name, detail=detail)
        entries.append((row.enrolled_at, "web", entry))
        if number % 3 == 0:
            detail = {"kind": "fallback", "text": "the link was away for 40 s", "at": now}
            entry = audit.AuditEntry(action="device.event", subject=row.name, detail=detail)
            entries.append((now - number * 3000.0, "devices", entry))
        if row.revoked_at:
            entry = audit.AuditEntry(action="device.revoke", subject=row.name, detail={"why": "stolen"})
            entries.append((row.revoked_at, "maria", entry))
    for at, actor, entry in sorted(entries, key=lambda one: one[0]):
        audit.append(session, actor, [entry], at)
