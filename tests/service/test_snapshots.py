"""What a worker counts is what the service shows."""

import itertools
from typing import Any

import pytest

from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.observability.triton_statistics import describe_statistics
from edgekit_runtime.service.worker_wire.channel import ChannelError
from edgekit_runtime.service.worker_wire.snapshots import add_up, read_snapshots, write_snapshots


def fill(start: int) -> LaneMetrics:
    metrics, numbers = LaneMetrics("m", "1"), itertools.count(start)
    for name in values(metrics):
        setattr(metrics, name, next(numbers))
    metrics.note_lone(1e-4, 5.0)
    metrics.note_run(4, 6, 1e-5, 2e-4, 3e-5)
    metrics.note_success(1e-3, 2e-4, 2e-3, 6.0)
    metrics.note_failure(0.5, 7.0)
    return metrics


def values(metrics: LaneMetrics) -> dict[str, object]:
    return {name: value for name, value in vars(metrics).items() if isinstance(value, (int, float))}


class _Version:
    """What is needed of a `Served` here."""

    version = "1"

    def __init__(self, metrics: LaneMetrics) -> None:
        self.metrics = metrics

    def to_json(self) -> dict[str, Any]:
        return {"variant": "default", "drift": {"looked_at": 3}}


def test_all_that_is_counted_arrives() -> None:
    metrics = fill(3)
    snapshot = read_snapshots(write_snapshots([_Version(metrics)]))["1"]  # type: ignore[list-item]
    assert snapshot.details == {"variant": "default", "drift": {"looked_at": 3}}
    read = snapshot.counted
    read.model, read.version = metrics.model, metrics.version
    assert values(read) == values(metrics)
    assert describe_statistics([read], wall_clock=float, clock=float) == describe_statistics(
        [metrics], wall_clock=float, clock=float
    )


def test_counts_of_two_workers_add_up() -> None:
    sums = LaneMetrics("m", "1")
    for _ in range(2):  # the second time instead of the first
        add_up(sums, [fill(3), fill(40)])
    assert sums.succeeded == fill(3).succeeded + fill(40).succeeded
    assert sums.total.counts == [2 * count for count in fill(3).total.counts]
    assert {kind: run.count for kind, run in sums.runs.items()} == {(1, 1): 2, (4, 6): 2}


@pytest.mark.parametrize("part", ["drift", "cache"])
@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN"])
def test_number_that_no_answer_can_hold_is_refused(part: str, number: str) -> None:
    sent = write_snapshots([_Version(fill(3))])  # type: ignore[list-item]
    wrong = sent.replace(b'"drift":{"looked_at":3}', f'"{part}":{{"a":[{number}]}}'.encode())
    assert wrong != sent
    with pytest.raises(ChannelError, match="cannot be read"):
        read_snapshots(wrong)


@pytest.mark.parametrize("sessions", [0, -1, True, 1.5, "2"])
def test_number_of_sessions_that_is_none_is_refused(sessions: object) -> None:
    version = _Version(fill(3))
    version.to_json = lambda: {"variant": "default", "sessions": sessions}  # type: ignore[method-assign]
    with pytest.raises(ChannelError, match="sessions"):
        read_snapshots(write_snapshots([version]))  # type: ignore[list-item]


@pytest.mark.parametrize("active", [-1, "2", None])
def test_number_of_sequences_that_is_none_is_refused(active: object) -> None:
    version = _Version(fill(3))
    stated = {"variant": "default", "sequences": {"active": active}}
    version.to_json = lambda: stated  # type: ignore[method-assign]
    with pytest.raises(ChannelError, match="cannot be read"):
        read_snapshots(write_snapshots([version]))  # type: ignore[list-item]


def test_comparison_of_a_rollout_arrives_and_a_false_one_is_refused() -> None:
    arm = {"answers": 1, "failed": 0}
    comparison = {"name": "agreement", "reason": "its shape", "guessed": True}
    rollout = {"current": arm, "candidate": arm, "agreement": 1.0, "comparison": comparison}
    version = _Version(fill(3))
    version.to_json = lambda: {"variant": "default", "rollout": rollout}  # type: ignore[method-assign]
    sent = write_snapshots([version])  # type: ignore[list-item]
    assert read_snapshots(sent)["1"].rollout == rollout
    for right, wrong in (
        (b'"name":"agreement"', b'"name":"best"'),
        (b'"reason":"its shape"', b'"reason":3'),
        (b'"guessed":true', b'"guessed":1'),
        (b'"comparison":{', b'"other":{'),
    ):
        assert right in sent
        with pytest.raises(ChannelError, match="cannot be read"):
            read_snapshots(sent.replace(right, wrong))
