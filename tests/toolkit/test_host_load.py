"""The load of the machine while latency is measured."""

import os
from pathlib import Path

import pytest

from edgekit_runtime.sessions.latency import Latency
from edgekit_toolkit.measurement.host_load import HostLoad, LoadMeter

STEADY = Latency((1.0, 1.0, 1.0, 1.0))


def stat(path: Path, *, user: int, idle: int, steal: int) -> None:
    """Write counters (in hundredths of a second, over all cores) as the kernel does."""
    core = min(os.sched_getaffinity(0))
    path.write_text(
        f"cpu  1 1 1 1\ncpu{core} {user} 0 0 {idle} 0 0 0 {steal} 0 0\nintr 5\n", encoding="ascii"
    )


def measured(folder: Path, *, user: int, idle: int, steal: int, own_s: float) -> HostLoad:
    """The load of a second in which counters grew by so much, and the own process used `own_s`."""
    path, clock = folder / "stat", iter([10.0, 10.0 + own_s])
    stat(path, user=500, idle=500, steal=50)
    meter = LoadMeter(path, lambda: next(clock))
    stat(path, user=500 + user, idle=500 + idle, steal=50 + steal)
    return meter.finish(STEADY)


def test_own_work_is_no_load(tmp_path: Path) -> None:
    load = measured(tmp_path, user=60, idle=40, steal=0, own_s=0.6)
    assert (load.others_share, load.stolen_share) == (pytest.approx(0), 0)
    assert not load.is_heavy


def test_work_of_others_is_counted_and_in_doubt(tmp_path: Path) -> None:
    load = measured(tmp_path, user=90, idle=10, steal=0, own_s=0.6)
    assert load.others_share == pytest.approx(0.3)
    assert load.is_heavy
    assert "other processes used 30 % of the" in str(load)


def test_stolen_time_is_counted_and_in_doubt(tmp_path: Path) -> None:
    load = measured(tmp_path, user=60, idle=30, steal=10, own_s=0.6)
    assert (load.others_share, load.stolen_share) == (pytest.approx(0), pytest.approx(0.1))
    assert load.is_heavy
    assert "10 % was stolen by the hypervisor" in str(load)


def test_runs_that_vary_are_in_doubt_whatever_the_counters_say(tmp_path: Path) -> None:
    meter = LoadMeter(tmp_path / "missing")
    load = meter.finish(Latency((1.0, 1.0, 2.0, 2.0, 1.0, 2.0)))
    assert (load.others_share, load.stolen_share) == (None, None)
    assert load.spread > 0.5
    assert load.is_heavy
    assert not meter.finish(STEADY).is_heavy
