"""Rollouts over the store: what devices are told, what a plan says, and that a killed manager goes on."""

import math
import random
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from sqlalchemy.orm import Session
from tests.agent.parts import NOON, want
from tests.toolkit.cases import cases

from edgekit_fleet.identity import enrolment
from edgekit_fleet.manager.inbox import DeviceIndex, Inbox
from edgekit_fleet.operations import devices, rollouts
from edgekit_fleet.operations.rollouts import StartRollout
from edgekit_fleet.rollouts import observations
from edgekit_fleet.rollouts.preview import DeviceView, PackageView, Situation, preview
from edgekit_fleet.rollouts.progress import AnswerEntry
from edgekit_fleet.rollouts.runner import RolloutRunner, read_entries
from edgekit_fleet.rollouts.selector import parse_selector
from edgekit_fleet.rollouts.views import read_devices
from edgekit_fleet.store.attributes import replace_attributes
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.shards import Shards
from edgekit_fleet.store.tables import (
    AttributeRow,
    DesiredRow,
    DeviceRow,
    ExecutionRow,
    FigureRow,
    ReleasePackageRow,
    ReleaseRow,
    RolloutRow,
    WantedModelRow,
)
from edgekit_runtime.agent.conditions import SPARE_BYTES, ModelView, find_obstacle
from edgekit_runtime.agent.documents import DesiredModel, ModelFigures, Reported, ReportedModel
from edgekit_runtime.agent.signing import seal
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.errors import FleetError

NOW = 4_000_000_000.0  # later than the clock of the machine, which `start_rollout` reads


def add_devices(store: Store, count: int, **facts: str) -> None:
    with store.transaction() as session:
        for number in range(count):
            name = f"d{number:03}"
            ran = {"model": "digits", "version": "1", "manifest_sha256": "old", "health": "healthy"}
            session.add(
                DeviceRow(
                    name=name,
                    target="rpi5" if number % 4 else "x86-64",
                    tags={"site": "lyon" if number % 2 else "nice"},
                    public_key=b"",
                    certificate_serial="1",
                    certificate_expires_at=NOW,
                    enrolled_at=0.0,
                    facts=facts,
                    reported={"models": [ran]},
                    is_online=True,
                )
            )
        session.flush()
        session.add_all(DesiredRow(device=f"d{number:03}", is_due=False) for number in range(count))
        replace_attributes(session, {f"d{number:03}": facts for number in range(count)})


def add_release(
    store: Store, name: str = "r", version: str = "2", targets: tuple[str, ...] = ("rpi5", "x86-64")
) -> None:
    with store.transaction() as session:
        session.add(ReleaseRow(name=name, created_at=0.0))
        session.flush()
        for target in targets:
            session.add(
                ReleasePackageRow(
                    release=name,
                    model="digits",
                    target=target,
                    version=version,
                    manifest_sha256=f"new-{version}-{target}",
                    path=f"{target}/digits-{version}-{target}.edgepkg",
                    size_bytes=1000,
                    sha256="ab",
                    needs={"engines": ["onnxruntime"]},
                )
            )


class Fleet:
    """Devices that answer what they are told, as the inbox would write it down."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name, self.now = store, name, NOW
        self.runner = RolloutRunner()
        self.answered: set[str] = set()

    def run(
        self, answer: Callable[[ExecutionRow], str], turns: int = 30, figures: ModelFigures | None = None
    ) -> str:
        for _ in range(turns):
            self.now += 400.0
            with self.store.transaction() as session:
                self.runner.turn(session, self.now)
            self.now += 1.0
            with self.store.transaction() as session:
                for row in session.scalars(select(ExecutionRow).where(ExecutionRow.state == "waiting")):
                    row.state = answer(row)
                    row.changed_at = row.ended_at = self.now
                    self.answered.add(row.device)
                    if (
                        figures is not None
                        and row.state == "succeeded"
                        and (row.model, row.version) == (figures.model, figures.version)
                    ):
                        session.merge(
                            FigureRow(
                                device=row.device,
                                model=row.model,
                                version=row.version,
                                hour=int(self.now // 3600),
                                figures=to_plain(figures),
                                reported_at=self.now,
                            )
                        )
            if self.row().state not in ("running", "paused", "returning"):
                break
        return self.row().state

    def row(self) -> RolloutRow:
        with self.store.transaction() as session:
            row = session.get(RolloutRow, self.name)
            assert row is not None
            return row

    def wanted(self) -> dict[str, DesiredModel]:
        with self.store.transaction() as session:
            rows = session.scalars(select(WantedModelRow)).all()
            return {row.device: from_plain(DesiredModel, row.document) for row in rows}


def start(store: Store, **changes: object) -> Fleet:
    request = StartRollout(release="r", selector="all", **changes)  # type: ignore[arg-type]
    return Fleet(store, rollouts.start_rollout(store, request, "anna"))


def succeed(_: ExecutionRow) -> str:
    return "succeeded"


def test_good_release_reaches_all_devices_and_marks_their_documents(store: Store) -> None:
    add_devices(store, 12)
    add_release(store)
    fleet = start(store)
    assert fleet.run(succeed) == "succeeded"
    wanted = fleet.wanted()
    assert len(wanted) == 12 and {one.version for one in wanted.values()} == {"2"}
    assert wanted["d000"].path == "x86-64/digits-2-x86-64.edgepkg" and wanted["d001"].path.startswith("rpi5/")
    with store.transaction() as session:
        due = session.scalars(select(DesiredRow.device).where(DesiredRow.is_due)).all()
    assert len(due) == 12
    assert rollouts.replay_rollout(store, fleet.name) == []
    assert rollouts.find_rollout(store, fleet.name).members == {"succeeded": 12}


def test_bad_release_stops_and_takes_its_devices_back(store: Store) -> None:
    add_devices(store, 100)
    add_release(store)
    fleet = start(store)
    bad = ModelFigures(model="digits", version="2", requests=50, restarts=4)
    assert fleet.run(succeed, figures=bad) == "aborted"
    wanted = fleet.wanted()
    assert len(wanted) == 10  # the first step, no more
    for document in wanted.values():
        assert (document.version, document.manifest_sha256, document.is_return) == ("1", "old", True)
    assert "crash" in fleet.row().because
    with store.transaction() as session:
        executions = session.scalars(select(ExecutionRow.execution)).all()
    assert len(set(executions)) == 20
    assert rollouts.replay_rollout(store, fleet.name) == []


def test_devices_of_a_step_begin_at_times_of_their_own_and_go_back_at_once(store: Store) -> None:
    add_devices(store, 10)
    add_release(store)
    fleet = start(store, waves="100%", minimum=10, spread_s=600.0)
    fleet.run(succeed)
    delays = {one.not_before_s for one in fleet.wanted().values()}
    assert len(delays) == 10 and 0 <= min(delays) < max(delays) <= 600
    rollouts.give_order(store, fleet.name, "abort", "anna")
    fleet.run(succeed)
    assert {(one.version, one.not_before_s) for one in fleet.wanted().values()} == {("1", 0.0)}


YEAR_S = 365 * 86_400.0


def test_rollout_goes_on_after_the_clock_was_a_year_ahead(store: Store) -> None:
    add_devices(store, 20)
    add_release(store)
    fleet = start(store)
    fleet.now += YEAR_S
    fleet.run(succeed, turns=2)
    fleet.now -= YEAR_S
    assert fleet.row().state == "running"
    assert fleet.run(succeed) == "succeeded"
    assert rollouts.replay_rollout(store, fleet.name) == []


def test_answer_that_comes_while_the_clock_is_set_back_by_seconds_counts(store: Store) -> None:
    add_devices(store, 1)
    add_release(store)
    fleet = start(store)
    with store.transaction() as session:
        fleet.runner.turn(session, fleet.now)
    with store.transaction() as session:
        fleet.runner.turn(session, fleet.now - 30.0)
        (row,) = session.scalars(select(ExecutionRow)).all()
        row.state, row.changed_at = "succeeded", fleet.now - 29.0
    with store.transaction() as session:
        fleet.runner.turn(session, fleet.now - 29.0)
    assert rollouts.find_rollout(store, fleet.name).members == {"succeeded": 1}


def add_figures(store: Store, devices: int, hours_ago: int, figures: ModelFigures) -> None:
    with store.transaction() as session:
        for number in range(devices):
            session.add(
                FigureRow(
                    device=f"d{number:03}",
                    model="digits",
                    version=figures.version,
                    hour=int(NOW // 3600) - hours_ago,
                    figures=to_plain(figures),
                    reported_at=NOW - 3600 * hours_ago,
                )
            )


@pytest.mark.parametrize(
    ("before", "after", "state"),
    [
        ([(0, 50)], (25, 50), "aborted"),
        ([(0, 10_000)], (3, 50), "aborted"),
        ([(2, 50)], (2, 50), "succeeded"),
        ([(2, 50)], (45, 50), "aborted"),
        ([(1, 10_000), (0, 10)], (1, 50), "succeeded"),  # the old version was just restarted
        ([(0, 10)], (1, 10_000), "succeeded"),
        ([(0, 10)], (50, 50), "aborted"),
        ([], (1, 10_000), "succeeded"),
        ([], (50, 50), "aborted"),
    ],
)
def test_nan_counts_against_a_release_where_it_is_more_frequent_than_before(
    store: Store, before: list[tuple[int, int]], after: tuple[int, int], state: str
) -> None:
    add_devices(store, 20)
    add_release(store)
    old = ModelFigures(model="digits", version="1")
    for hour, (bad, answers) in enumerate(reversed(before), 1):
        add_figures(store, 20, hour, replace(old, requests=100_000, looked_at=answers, not_finite=bad))
    fleet = start(store)
    new = replace(old, version="2", not_finite=after[0], looked_at=after[1], requests=100_000)
    assert fleet.run(succeed, figures=new) == state


def test_figures_of_the_version_before_are_read_once_a_device(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_devices(store, 20)
    add_release(store)
    old = ModelFigures(model="digits", version="1", requests=50, looked_at=50, not_finite=2)
    add_figures(store, 20, 1, old)
    reads: list[str] = []
    read = observations.count_before

    def count(session: Session, row: FigureRow) -> tuple[int, int]:
        reads.append(row.device)
        return read(session, row)

    monkeypatch.setattr(observations, "count_before", count)
    fleet = start(store, soak_s=3600.0)
    for _ in range(3):
        fleet.run(succeed, turns=1, figures=replace(old, version="2"))
        with store.transaction() as session:  # the devices report again
            for row in session.scalars(select(FigureRow).where(FigureRow.version == "2")):
                row.reported_at = fleet.now
    assert len(reads) == len(set(reads)) > 0


def test_device_that_ran_nothing_goes_back_to_nothing(store: Store) -> None:
    add_devices(store, 4)
    add_release(store)
    with store.transaction() as session:
        for row in session.scalars(select(DeviceRow)):
            row.reported = {"models": []}
    fleet = start(store, waves="100%", minimum=4)
    assert fleet.run(lambda row: "failed") == "aborted"
    with store.transaction() as session:
        assert {row.is_removed for row in session.scalars(select(WantedModelRow))} == {True}


def test_device_that_had_not_reported_keeps_the_model_of_its_image(store: Store) -> None:
    add_devices(store, 4)
    add_release(store)
    with store.transaction() as session:
        for row in session.scalars(select(DeviceRow)):
            row.reported = None
    fleet = start(store, waves="100%", minimum=4)
    fleet.run(lambda row: "waiting", turns=2)
    rollouts.give_order(store, fleet.name, "abort", "anna")
    assert fleet.run(lambda row: "waiting") == "aborted"
    with store.transaction() as session:
        assert session.scalars(select(WantedModelRow)).all() == []
        assert session.scalars(select(DesiredRow.is_due)).all() == [True] * 4
    assert "(unknown-before: 4)" in fleet.row().because


@pytest.mark.parametrize("because", ["2 was rejected here: was begun 3 times", "pinned to 1 by hand"])
def test_device_that_falls_back_after_its_success_counts_as_faulty(store: Store, because: str) -> None:
    add_devices(store, 20)
    add_release(store)
    fleet = start(store, soak_s=1e4)
    fleet.run(succeed, turns=2)
    with store.transaction() as session:
        for row in session.scalars(select(DeviceRow)):
            ran = {"model": "digits", "version": "1", "manifest_sha256": "old", "because": because}
            row.reported, row.status, row.last_seen_at = {"models": [ran]}, "diverged", fleet.now
    state = fleet.run(succeed, turns=3)
    assert (state == "aborted") == ("rejected" in because)
    assert ("fell back" in fleet.row().because) == ("rejected" in because)
    assert rollouts.replay_rollout(store, fleet.name) == []


def test_manager_that_is_killed_after_every_turn_decides_the_same(store: Store) -> None:
    add_devices(store, 40)
    add_release(store)
    fleet = start(store)
    for _ in range(40):
        fleet.runner = RolloutRunner()
        if fleet.run(succeed, turns=1) == "succeeded":
            break
    assert fleet.row().state == "succeeded" and len(fleet.answered) == 40
    assert rollouts.replay_rollout(store, fleet.name) == []


@pytest.mark.parametrize("is_return", [False, True])
def test_manager_that_is_killed_between_batches_goes_on_with_the_next(store: Store, is_return: bool) -> None:
    add_devices(store, 40)
    add_release(store)
    fleet = start(store, waves="100%", minimum=40)
    if is_return:
        fleet.run(succeed)
        rollouts.give_order(store, fleet.name, "abort", "anna")
    sizes = []
    for _ in range(6):
        fleet.runner = RolloutRunner(devices_per_turn=7)  # which knows only what the store holds
        with store.transaction() as session:
            more = fleet.runner.turn(session, fleet.now)
        sizes.append(sum(one.is_return == is_return for one in fleet.wanted().values()))
        assert more == (sizes[-1] < 40)
        assert fleet.row().state == ("returning" if is_return else "running")
        assert not (more and fleet.row().ended_at)
    assert sizes == [7, 14, 21, 28, 35, 40]
    with store.transaction() as session:
        names = session.scalars(select(ExecutionRow.execution)).all()
    assert len(names) == len(set(names)) == 40 * (1 + is_return)
    assert fleet.run(succeed) == ("aborted" if is_return else "succeeded")
    assert rollouts.replay_rollout(store, fleet.name) == []


def test_order_to_stop_between_batches_takes_all_devices_back(store: Store) -> None:
    add_devices(store, 40)
    add_release(store)
    fleet = start(store, waves="100%", minimum=40)
    fleet.runner = RolloutRunner(devices_per_turn=7)
    fleet.run(lambda row: "waiting", turns=2)
    rollouts.give_order(store, fleet.name, "abort", "anna")
    assert fleet.run(lambda row: "waiting") == "aborted"
    wanted = fleet.wanted()
    assert len(wanted) == 14 and all(one.is_return for one in wanted.values())
    assert rollouts.replay_rollout(store, fleet.name) == []


@pytest.mark.parametrize("is_killed", [False, True])
def test_pause_between_batches_offers_to_nobody_more_until_it_goes_on(store: Store, is_killed: bool) -> None:
    add_devices(store, 40)
    add_release(store)
    fleet = start(store, waves="100%", minimum=40)
    fleet.runner = RolloutRunner(devices_per_turn=7)
    fleet.run(succeed, turns=2)
    rollouts.give_order(store, fleet.name, "pause", "anna")
    if is_killed:
        fleet.runner = RolloutRunner(devices_per_turn=7)
    fleet.run(succeed, turns=5)
    assert len(fleet.wanted()) == 14 and fleet.row().state == "paused"
    rollouts.give_order(store, fleet.name, "resume", "anna")
    assert fleet.run(succeed) == "succeeded"
    assert len(fleet.wanted()) == 40
    with store.transaction() as session:
        assert len(session.scalars(select(ExecutionRow.execution)).all()) == 40
    assert rollouts.replay_rollout(store, fleet.name) == []


def test_fault_seen_between_batches_stops_the_offers(store: Store) -> None:
    add_devices(store, 40)
    add_release(store)
    fleet = start(store, waves="100%", minimum=40)
    fleet.runner = RolloutRunner(devices_per_turn=7)
    bad = ModelFigures(model="digits", version="2", requests=50, restarts=4)
    assert fleet.run(succeed, figures=bad) == "aborted"
    wanted = fleet.wanted()
    assert len(wanted) <= 14 and all(one.is_return for one in wanted.values())
    assert rollouts.replay_rollout(store, fleet.name) == []


def test_transaction_that_fails_leaves_no_decision(store: Store) -> None:
    add_devices(store, 12)
    add_release(store)
    fleet = start(store)
    with pytest.raises(RuntimeError), store.transaction() as session:
        fleet.runner.turn(session, fleet.now)
        raise RuntimeError
    with store.transaction() as session:
        assert len(read_entries(session, fleet.name)) == 1
    assert fleet.run(succeed) == "succeeded"


def test_finished_rollout_is_rolled_back_by_order(store: Store) -> None:
    add_devices(store, 12)
    add_release(store)
    fleet = start(store)
    fleet.run(succeed)
    rollouts.give_order(store, fleet.name, "abort", "anna", note="customers complain")
    assert fleet.run(succeed) == "aborted"
    assert {one.version for one in fleet.wanted().values()} == {"1"}
    assert "anna" in fleet.row().because


def test_orders_are_followed_and_misplaced_ones_refused(store: Store) -> None:
    add_devices(store, 40)
    add_release(store)
    fleet = start(store, approval="first")
    fleet.run(succeed, turns=2)
    assert "waits for an approval" in fleet.row().because and not fleet.wanted()
    rollouts.give_order(store, fleet.name, "approve", "anna")
    fleet.run(succeed, turns=1)
    assert fleet.wanted()
    rollouts.give_order(store, fleet.name, "pause", "anna")
    count = len(fleet.wanted())
    fleet.run(succeed, turns=5)
    assert len(fleet.wanted()) == count and fleet.row().state == "paused"
    with pytest.raises(FleetError, match="is paused, expected running to pause it"):
        rollouts.give_order(store, fleet.name, "pause", "anna")
    rollouts.give_order(store, fleet.name, "resume", "anna")
    assert fleet.run(succeed) == "succeeded"
    with pytest.raises(FleetError, match="no rollout 'x', the newest are: r-r1"):
        rollouts.give_order(store, "x", "abort", "anna")


def test_plan_names_who_is_refused_and_why(store: Store) -> None:
    add_devices(store, 9, engines="onnxruntime", free_bytes="50000000", battery="mains")
    add_release(store)
    changes = {
        "d001": {"target": "jetson-orin-nano"},
        "d002": {"pinned": {"digits": "1"}},
        "d003": {"revoked_at": 1.0},
        "d004": {"facts": {"engines": "litert"}},
        "d005": {"facts": {"free_bytes": "10"}},
        "d006": {"reported": {"models": [{"model": "digits", "version": "3", "manifest_sha256": "x"}]}},
        "d007": {
            "reported": {"models": [{"model": "digits", "version": "2", "manifest_sha256": "new-2-rpi5"}]}
        },
    }
    with store.transaction() as session:
        for name, values in changes.items():
            row = session.get(DeviceRow, name)
            for key, value in values.items():
                setattr(row, key, value)
    plan = rollouts.plan_rollout(store, StartRollout(release="r", selector="all"))
    assert [one.device for one in plan.planned] == ["d000", "d008"] and plan.bytes == 2000
    assert {one.device: one.code for one in plan.refused} == {
        "d001": "class",
        "d002": "pinned",
        "d003": "revoked",
        "d004": "engine",
        "d005": "disk",
        "d006": "newer",
        "d007": "same",
    }
    assert rollouts.list_rollouts(store) == []


def test_plan_and_device_have_one_rule_for_the_room_on_a_disk() -> None:
    draw = random.Random(28)
    outcomes = set()
    for _ in range(500):
        size_bytes = draw.choice((1, 1000, 1 << 20, 1 << 30))
        needed_bytes = 2 * size_bytes + SPARE_BYTES
        free_bytes = max(0, needed_bytes + draw.choice((-1, 0, 1, -size_bytes, size_bytes)))
        package = PackageView(
            model="kws",
            target="rpi5",
            version="2.0.0",
            manifest_sha256="b" * 64,
            path="p",
            size_bytes=size_bytes,
            sha256="c" * 64,
        )
        situation = Situation(target="rpi5", is_disk_known=True)
        planned, _ = preview([DeviceView("d1", situation, str(free_bytes))], [package])
        obstacle = find_obstacle(
            want(size_bytes=size_bytes), ModelView(model="kws"), replace(NOON, free_bytes=free_bytes), 0
        )
        assert bool(planned) == (obstacle is None), (size_bytes, free_bytes)
        outcomes.add(bool(planned))
    assert outcomes == {True, False}


@pytest.mark.parametrize("because", ["2 answered NaN", ""])
def test_faulty_and_revoked_are_the_same_in_lists_and_selectors(store: Store, because: str) -> None:
    add_devices(store, 3)
    key = Ed25519PrivateKey.generate()
    with store.transaction() as session:
        rows = [session.get(DeviceRow, f"d{number:03}") for number in range(3)]
        for row in rows:
            row.status, row.last_seen_at = "converged", 0.0
            row.public_key = key.public_key().public_bytes_raw()
        session.flush()
        enrolment.revoke(session, "d001", "test", "stolen")
        shards = Shards.of_all()
        index = DeviceIndex(shards)
        index.load(session, ["d000", "d001", "d002"])
    inbox = Inbox(index, shards)
    for name in ("d000", "d001"):
        model = ReportedModel(
            model="digits", version="2", manifest_sha256="x", health="faulty", because=because
        )
        report = Reported(device=name, sequence=1, status="converged", models=(model,), facts={})
        inbox.put(f"ek/v1/d/{name}/reported", seal(report, "reported", key))
    inbox.take(NOW)
    with store.transaction() as session:
        inbox.write(session, NOW)
    listed = {one.name: one.status for one in devices.page_devices(store, "all")[0]}
    assert listed == {"d000": "faulty", "d001": "revoked", "d002": "converged"}
    for name, status in listed.items():
        found, _ = devices.page_devices(store, f"status={status}")
        assert [one.name for one in found] == [name]
    with store.transaction() as session:
        views = read_devices(session, parse_selector("status=faulty and model:digits=2"), ())
        assert [view.name for view in views] == ["d000"]
        attributes = {row.name: row.value for row in session.query(AttributeRow).filter_by(device="d000")}
    assert attributes == {"model:digits": "2", "site": "nice"}
    assert devices.describe(store, "d000").summary.because == (because or "digits is faulty")
    said = because or "digits is faulty, and it states no reason"
    assert devices.describe(store, "d000").why.endswith(f", but {said}.")


def test_device_in_an_open_rollout_is_refused_by_the_next(store: Store) -> None:
    add_devices(store, 4)
    add_release(store)
    add_release(store, "s", "3")
    name = start(store).name
    with pytest.raises(FleetError, match=r"no device gets release 's' by 'all': d00.: rollout 'r-r1' has it"):
        rollouts.start_rollout(store, StartRollout(release="s", selector="all"), "anna")
    rollouts.give_order(store, name, "abort", "anna")
    Fleet(store, name).run(succeed)
    assert rollouts.start_rollout(store, StartRollout(release="s", selector="all"), "anna") == "s-r1"


@pytest.fixture
def released(store: Store) -> None:
    add_devices(store, 300)
    add_release(store)


@cases(
    ("changes", "message"),
    [
        ({"release": "q"}, "no release 'q', the newest are: r"),
        ({"selector": "site=paris"}, "none matches"),
        ({"approval": "never"}, "expected one of none, first, each"),
        ({"limits": rollouts.RolloutLimits(alpha=2.0)}, "alpha is 2.0, expected"),
        ({"waves": "1%"}, "end with 100%"),
        ({"patience_s": 0.0}, "patience_s is 0, expected at least 5"),
        ({"patience_s": 60.0, "spread_s": 60.0}, "patience_s is 60, expected at least 65"),
        ({"step_timeout_s": 0.0}, "step_timeout_s is 0, expected at least 360"),
        ({"soak_s": 172_800.0}, "step_timeout_s is 172800, expected at least 172860"),
        ({"soak_s": -1.0}, "soak_s"),
    ],
)
def test_wrong_request_is_refused(
    store: Store, released: None, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(FleetError, match=message):
        rollouts.start_rollout(store, StartRollout(**{"release": "r", "selector": "all", **changes}), "anna")  # type: ignore[arg-type]


def test_name_that_somebody_gave_to_another_rollout_is_left_out(store: Store) -> None:
    add_devices(store, 20)
    add_release(store)
    first = StartRollout(release="r", selector="name=d001", name="r-r2")
    rollouts.start_rollout(store, first, "anna")
    assert rollouts.start_rollout(store, StartRollout(release="r", selector="name=d002"), "anna") == "r-r3"


def test_frozen_cohort_does_not_follow_tags_and_a_dynamic_one_does(store: Store) -> None:
    add_devices(store, 20)
    add_release(store)
    request = StartRollout(release="r", selector="site=lyon", is_dynamic=True)
    fleet = Fleet(store, rollouts.start_rollout(store, request, "anna"))
    effects = rollouts.find_tag_effects(store, "d000", {"site": "lyon"})
    assert effects == [f"d000 joins rollout '{fleet.name}' and gets release 'r'"]
    assert "still gets" in rollouts.find_tag_effects(store, "d001", {"site": ""})[0]
    assert rollouts.find_tag_effects(store, "d000", {"floor": "2"}) == []
    devices.tag(store, "d000", {"site": "lyon"}, "anna")
    assert fleet.run(succeed) == "succeeded"
    assert len(fleet.wanted()) == 11 and "d000" in fleet.wanted()


def test_rollout_whose_selector_is_no_longer_allowed_keeps_its_cohort(store: Store) -> None:
    add_devices(store, 20)
    add_release(store)
    request = StartRollout(release="r", selector="site=lyon", is_dynamic=True)
    fleet = Fleet(store, rollouts.start_rollout(store, request, "anna"))
    with store.transaction() as session:
        session.get(RolloutRow, fleet.name).selector = "not battery=low"
    assert rollouts.find_tag_effects(store, "d000", {"site": "lyon"}) == []
    assert fleet.run(succeed) == "succeeded"
    assert len(fleet.wanted()) == 10


def add_reports(
    store: Store, hours: dict[float, tuple[int, float]], *, but: Collection[str] = (), model: str = "digits"
) -> None:
    """Add what all but some of 100 devices report of version 1: hours from now -> calls, their seconds."""
    with store.transaction() as session:
        for name in {f"d{number:03}" for number in range(100)}.difference(but):
            for hour, (requests, answer_s) in hours.items():
                at = NOW + hour * 3600
                figures = ModelFigures(model=model, version="1", requests=requests, answer_s=answer_s)
                session.merge(
                    FigureRow(
                        device=name,
                        model=model,
                        version="1",
                        hour=int(at // 3600),
                        figures=to_plain(figures),
                        reported_at=at,
                    )
                )


def read_latencies(store: Store, rollout: str) -> list[float]:
    with store.transaction() as session:
        logged = [one for _, _, one in read_entries(session, rollout) if isinstance(one, AnswerEntry)]
    return [reading.measures["latency"] for one in logged for reading in one.readings]


def test_latency_is_compared_with_devices_that_still_run_the_old_version(store: Store) -> None:
    """All devices are twice as slow from the start of the rollout on: the release is not the reason."""
    add_devices(store, 100)
    add_release(store)
    fleet = start(store, minimum=30)
    slow = ModelFigures(model="digits", version="2", requests=100, answer_s=2.0)
    fleet.run(succeed, turns=1, figures=slow)
    add_reports(store, {-3: (1000, 10.0), -0.5: (1100, 11.0)})
    add_reports(store, {0.1: (1200, 13.0)}, but=fleet.wanted())
    fleet.run(succeed, turns=1, figures=slow)
    assert read_latencies(store, fleet.name) == pytest.approx([0.0] * 30, abs=1e-9)
    assert fleet.row().state == "running" and len(fleet.wanted()) > 30


@pytest.mark.parametrize("busy_s", [1.0, 500.0])
def test_busy_hours_before_speak_neither_for_a_release_nor_against_it(store: Store, busy_s: float) -> None:
    """Twice the latency counts as such, whatever the old version counted on either side the day before."""
    add_devices(store, 100)
    add_release(store)
    fleet = start(store, minimum=30)
    add_reports(store, {-20: (1000, busy_s), -0.5: (2000, busy_s + 10.0), 0.05: (3000, busy_s + 20.0)})
    slow = ModelFigures(model="digits", version="2", requests=100, answer_s=2.0)
    assert fleet.run(succeed, figures=slow) == "aborted"
    assert read_latencies(store, fleet.name) == pytest.approx([math.log(2.0)] * 30)


def test_model_that_the_device_ran_already_is_not_judged(store: Store) -> None:
    add_devices(store, 100)
    add_release(store)
    add_model(store, "words")
    with store.transaction() as session:
        for row in session.scalars(select(DeviceRow)):
            ran = {"model": "words", "version": "2", "manifest_sha256": f"words-2-{row.target}"}
            row.reported = {"models": [*row.reported["models"], ran]}
    fleet = start(store)
    add_reports(store, {-2: (1000, 10.0), -1: (2000, 20.0)}, model="words")
    slow = ModelFigures(model="words", version="2", requests=100, answer_s=9.0)
    assert fleet.run(succeed, figures=slow) == "succeeded"
    assert read_latencies(store, fleet.name) == []


def test_second_model_that_is_slow_stops_the_rollout(store: Store) -> None:
    add_devices(store, 100)
    add_release(store)
    add_model(store, "words")
    fleet = start(store, minimum=30)
    for model in ("digits", "words"):
        add_reports(store, {-2: (1000, 10.0), -1: (2000, 20.0), 1: (3000, 30.0)}, model=model)
    good = ModelFigures(model="digits", version="2", requests=100, answer_s=1.0)
    fleet.run(succeed, turns=2, figures=good)
    with store.transaction() as session:  # words follows later
        for device in session.scalars(select(FigureRow.device).where(FigureRow.version == "2")).all():
            slow = ModelFigures(model="words", version="2", requests=100, answer_s=2.0)
            session.add(
                FigureRow(
                    device=device,
                    model="words",
                    version="2",
                    hour=int(fleet.now // 3600),
                    figures=to_plain(slow),
                    reported_at=fleet.now,
                )
            )
    assert fleet.run(succeed, figures=good) == "aborted"
    assert "latency of words is 2.00 times the old version's" in fleet.row().because
    assert rollouts.replay_rollout(store, fleet.name) == []


def test_figures_that_get_worse_later_stop_the_rollout(store: Store) -> None:
    add_devices(store, 100)
    add_release(store)
    fleet = start(store, minimum=30)
    add_reports(store, {-2: (1000, 10.0), -1: (2000, 20.0), 1: (3000, 30.0)})
    good = ModelFigures(model="digits", version="2", requests=100, answer_s=1.0)
    fleet.run(succeed, turns=2, figures=good)
    with store.transaction() as session:
        for row in session.scalars(select(FigureRow).where(FigureRow.version == "2")):
            row.figures = to_plain(replace(good, requests=1000, answer_s=20.0))
            row.reported_at = fleet.now
    assert fleet.run(succeed, figures=good) == "aborted"
    assert rollouts.replay_rollout(store, fleet.name) == []


def test_models_of_a_release_have_their_own_order_and_priority(store: Store) -> None:
    add_devices(store, 4)
    add_release(store)
    add_model(store, "words")
    with pytest.raises(FleetError, match="release 'r' has no model 'word', it has: digits, words"):
        start(store, orders={"word": "unloaded"})
    wanted = {"order": "old-first", "orders": {"words": "unloaded"}, "priorities": {"words": 3}}
    fleet = start(store, waves="100%", minimum=4, **wanted)
    fleet.run(lambda row: "waiting", turns=1)
    with store.transaction() as session:
        documents = [row.document for row in session.scalars(select(WantedModelRow))]
    found = {(one["model"], one["order"], one["priority"]) for one in documents}
    assert found == {("digits", "old-first", 0), ("words", "unloaded", 3)}


def test_figures_that_no_device_can_have_do_not_stop_the_manager(store: Store) -> None:
    add_devices(store, 20)
    add_release(store)
    fleet = start(store)
    with store.transaction() as session:
        tiny = ModelFigures(model="digits", version="1", requests=100, answer_s=5e-320, energy_mj=1e-300)
        session.add_all(
            FigureRow(
                device=f"d{number:03}",
                model="digits",
                version="1",
                hour=int(NOW // 3600) - 1,
                figures=to_plain(tiny),
                reported_at=NOW - 3600,
            )
            for number in range(20)
        )
    huge = ModelFigures(
        model="digits", version="2", requests=100, answer_s=1e9, energy_mj=2e9, agreement=2e9, compared=9
    )
    fleet.run(succeed, turns=4, figures=huge)
    with store.transaction() as session:
        logged = read_entries(session, fleet.name)
    measured = [one.readings[0] for _, _, one in logged if isinstance(one, AnswerEntry) and one.readings]
    assert measured[0].stage == 0 and measured[0].measures == {
        "latency": 20.0,
        "energy": 20.0,
        "disagreement": 0.0,
        "errors": 0.0,
    }


def test_device_that_fails_twice_by_the_network_is_tried_a_third_time(store: Store) -> None:
    add_devices(store, 1)
    add_release(store)
    fleet = start(store)
    tries: list[str] = []

    def answer(row: ExecutionRow) -> str:
        tries.append(row.execution)
        row.code = "timeout" if len(tries) < 3 else ""
        return "failed" if len(tries) < 3 else "succeeded"

    assert fleet.run(answer) == "succeeded"
    assert len(set(tries)) == 3


def add_model(store: Store, model: str, release: str = "r", version: str = "2") -> None:
    """Add another model to a release."""
    with store.transaction() as session:
        for target in ("rpi5", "x86-64"):
            session.add(
                ReleasePackageRow(
                    release=release,
                    model=model,
                    target=target,
                    version=version,
                    manifest_sha256=f"{model}-{version}-{target}",
                    path=f"{target}/{model}",
                    size_bytes=1000,
                    sha256="ac",
                    needs={"engines": ["onnxruntime"]},
                )
            )


@pytest.mark.parametrize("models", [("digits",), ("digits", "words")])
def test_abort_takes_the_release_back_from_devices_that_refused_a_model(
    store: Store, models: tuple[str, ...]
) -> None:
    add_devices(store, 4)
    add_release(store)
    for model in models[1:]:
        add_model(store, model)
    fleet = start(store, waves="100%", minimum=4)

    def refuse_last(row: ExecutionRow) -> str:
        return "refused" if (row.version, row.model) == ("2", models[-1]) else "succeeded"

    fleet.run(refuse_last, turns=1)
    rollouts.give_order(store, fleet.name, "abort", "anna")
    assert fleet.run(refuse_last) == "aborted"
    assert "4 devices go back" in fleet.row().because
    with store.transaction() as session:
        rows = session.scalars(select(WantedModelRow)).all()
        assert len(rows) == 4 * len(models)
        assert all(row.is_removed or row.document["version"] == "1" for row in rows)


def test_rollout_goes_back_until_each_device_has_and_tells_who_has_not(store: Store) -> None:
    add_devices(store, 4)
    add_release(store)
    fleet = start(store, waves="100%", minimum=4)
    fleet.run(succeed)
    failures = {"d000": 1, "d001": 99}  # so often the way back fails
    tries: list[str] = []

    def answer(row: ExecutionRow) -> str:
        tries.append(row.device)
        if tries.count(row.device) > failures.get(row.device, 0):
            return "succeeded"
        row.code = "disk-full"
        return "failed"

    rollouts.give_order(store, fleet.name, "abort", "anna")
    assert fleet.run(answer, turns=2) == "returning"
    assert rollouts.find_rollout(store, fleet.name).members == {"returned": 2, "failed": 2}
    fleet.runner = RolloutRunner()  # which knows only what the store holds
    assert fleet.run(answer) == "aborted"
    assert (tries.count("d000"), tries.count("d001"), tries.count("d002")) == (2, 3, 1)
    assert rollouts.find_rollout(store, fleet.name).members == {"returned": 3, "failed": 1}
    assert fleet.row().because.endswith("; 1 device has not gone back (disk-full: 1)")
    assert fleet.wanted()["d001"].version == "1"
    assert rollouts.replay_rollout(store, fleet.name) == []


def test_device_that_does_not_answer_holds_the_way_back_of_no_other_up(store: Store) -> None:
    add_devices(store, 4)
    add_release(store)
    add_release(store, "s", "3")
    fleet = start(store, waves="100%", minimum=4)
    fleet.run(succeed)
    rollouts.give_order(store, fleet.name, "abort", "anna")

    def answer(row: ExecutionRow) -> str:
        return "waiting" if row.device == "d002" else "succeeded"

    assert fleet.run(answer, turns=3) == "returning"
    plan = rollouts.plan_rollout(store, StartRollout(release="s", selector="all"))
    assert [one.device for one in plan.planned] == ["d000", "d001", "d003"]
    assert fleet.run(answer) == "aborted"
    assert fleet.row().because.endswith("; 1 device has not answered to that yet")
    assert rollouts.find_rollout(store, fleet.name).members == {"returned": 3, "returning": 1}


def report(store: Store, version: str) -> None:
    """Let the devices report the version of a release that they have."""
    with store.transaction() as session:
        for row in session.scalars(select(DeviceRow)):
            digest = "old" if version == "1" else f"new-{version}-{row.target}"
            ran = {"model": "digits", "version": version, "manifest_sha256": digest, "health": "healthy"}
            row.reported = {"models": [ran]}


def follow(store: Store, release: str, version: str, selector: str = "all") -> Fleet:
    add_release(store, release, version)
    request = StartRollout(release=release, selector=selector)
    fleet = Fleet(store, rollouts.start_rollout(store, request, "anna"))
    fleet.now += 1e5
    return fleet


def test_rollback_leaves_devices_on_which_another_rollout_has_decided_since(store: Store) -> None:
    add_devices(store, 12)
    add_release(store)
    first = start(store)
    first.run(succeed)
    report(store, "2")
    second = follow(store, "s", "3", "site=lyon")
    assert second.run(succeed) == "succeeded"
    rollouts.give_order(store, first.name, "abort", "anna")
    assert "which stay: 6 by 's-r1'" in first.row().because
    assert first.run(succeed) == "aborted"
    wanted = fleet_versions(store)
    assert wanted == {**dict.fromkeys(wanted, "1"), **{f"d{one:03}": "3" for one in range(1, 12, 2)}}
    assert "(another-rollout: 6)" in first.row().because
    assert rollouts.replay_rollout(store, first.name) == []


def fleet_versions(store: Store) -> dict[str, str]:
    return {device: one.version for device, one in Fleet(store, "").wanted().items()}


def test_rollback_of_a_rollout_that_another_one_has_replaced_everywhere_is_refused(store: Store) -> None:
    add_devices(store, 12)
    add_release(store)
    first = start(store)
    first.run(succeed)
    report(store, "2")
    second = follow(store, "s", "3")
    second.run(succeed)
    with pytest.raises(FleetError, match="'r-r1' decides on none of its devices any more: 's-r1' came after"):
        rollouts.give_order(store, first.name, "abort", "anna")
    # The one that came after goes back to what the first one wants, which can go back, too.
    rollouts.give_order(store, second.name, "abort", "anna")
    assert second.run(succeed) == "aborted"
    assert set(fleet_versions(store).values()) == {"2"}
    report(store, "2")
    rollouts.give_order(store, first.name, "abort", "anna")
    assert first.run(succeed) == "aborted"
    assert set(fleet_versions(store).values()) == {"1"}
