"""A version on trial in the process of an isolated model: crashes, standby, counts, and who settles it."""

import contextlib
import dataclasses
import errno
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.descriptor_parts import count_descriptors
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import Running, X, Y, infer_bytes, make_config, running
from tests.service.wiring_parts import (
    ENDLESS,
    ask_many,
    index,
    infer,
    load,
    metrics,
    statistics,
    write,
)
from tests.service.worker_parts import OTHER, ask_again, asking, find_model, find_pids, kill, wait_backed
from tests.waiting import is_running, wait_for

from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.options.model import Isolation, ModelOptions
from edgekit_runtime.service.options.resources import DriftLimits
from edgekit_runtime.service.options.rollout import CanaryOptions, Gates
from edgekit_runtime.service.workers import worker_handle
from edgekit_runtime.service.workers.isolated_model import WorkerTrialRunner
from edgekit_runtime.service.workers.worker_handle import WorkerHandle
from edgekit_runtime.slots import HEALTHY, Slots

SHORT = ModelOptions(
    rollout="canary",
    canary=CanaryOptions(share=0.5),
    # Wide, so that few calls decide.
    gates=Gates(min_agreement=0.1, max_p50_ratio=0, max_p99_ratio=0, max_extra_errors=0.9, min_samples=20),
)


@pytest.fixture
def slots(maker: PackageMaker, tmp_path: Path) -> Slots:
    """Slots with `linear` 1.0.0 and `other`, which have proved themselves, and `linear` 2.0.0."""
    found = Slots(tmp_path / "state", maker.trust)
    for name in ("linear", "other"):
        found.install(write(maker, tmp_path, "1.0.0", name=name))
        found.begin_start(name).package.close()
        found.confirm(name, "1.0.0")
    found.install(write(maker, tmp_path, "2.0.0"))
    return found


@contextlib.contextmanager
def serving(slots: Slots, options: ModelOptions = ENDLESS, **isolation: Any) -> Iterator[Running]:
    """Serve `linear`, isolated and with 2.0.0 on trial, and `other`."""
    options = dataclasses.replace(options, isolated=True, isolation=Isolation(**isolation))
    config = make_config(slots.folder.parent, models={"linear": options})
    with running(config, InstalledModels(slots)) as service:
        yield service


def rejected(slots: Slots) -> dict[str, str]:
    return {each.version: each.reason for each in slots.load("linear").state.rejected}


def assert_first_serves(service: Running, slots: Slots) -> None:
    reply = ask_again(service, infer_bytes(X))
    assert (reply.json["model_version"], reply.binary) == ("1.0.0", Y)
    assert "rollout" not in statistics(service)
    current = slots.load("linear").state.current
    assert current is not None
    assert (current.version, current.health) == ("1.0.0", HEALTHY)


def ask_until_promoted(service: Running) -> None:
    """Ask in pauses: the worker judges once a second."""
    assert any(
        number % 25 == 0 and index(service)[0][1] == "2.0.0"
        for number, _ in enumerate(ask_many(service, 3000, pause_s=0.002))
    )


def test_crash_is_laid_on_the_candidate_and_costs_other_models_nothing(slots: Slots) -> None:
    with serving(slots, max_crashes=1) as service, asking(service, OTHER) as other:
        assert statistics(service)["rollout"]["candidate_version"] == "2.0.0"
        list(ask_many(service, 20))
        pid = kill(service, signal.SIGSEGV)
        wait_for(lambda: not is_running(pid), "the end of the worker")
        wait_for(lambda: "2.0.0" in rejected(slots), "the rejection")
        assert "crash" in rejected(slots)["2.0.0"]
        assert "SIGSEGV" in rejected(slots)["2.0.0"]
        assert_first_serves(service, slots)
        assert [line[1:3] for line in index(service)][:2] == [("1.0.0", "READY"), ("2.0.0", "UNAVAILABLE")]
        assert 'edgekit_swaps_total{model="linear",outcome="rolled_back"} 1' in metrics(service)
    assert (set(other.statuses), other.ends, other.wrong) == ({200}, 0, 0)


def test_hang_is_laid_on_the_candidate(slots: Slots) -> None:
    with serving(slots, hang_s=1.0) as service:
        kill(service, signal.SIGSTOP)
        wait_for(lambda: "no heartbeat" in rejected(slots).get("2.0.0", ""), "the rejection")
        assert_first_serves(service, slots)


def test_standby_takes_over_from_a_crash_with_the_version_in_use(slots: Slots) -> None:
    with serving(slots, standby=True) as service:
        wait_backed(service)
        first, second = find_pids(service)
        os.kill(first, signal.SIGSEGV)
        wait_for(lambda: find_pids(service)[:1] == (second,), "the switch")
        wait_for(lambda: "2.0.0" in rejected(slots), "the rejection")
        assert_first_serves(service, slots)


def test_promoted_version_is_what_stands_by_and_what_is_started_after_a_crash(slots: Slots) -> None:
    with serving(slots, SHORT, standby=True) as service:
        wait_backed(service)
        first, old_standby = find_pids(service)
        ask_until_promoted(service)
        wait_for(lambda: infer(service).json["model_version"] == "2.0.0", "the promotion")
        wait_for(lambda: not is_running(old_standby), "the end of the old version's standby")
        wait_backed(service)
        assert find_pids(service)[0] == first
        for _ in range(2):  # the one that took over, then one that was started for this version
            pid = kill(service, signal.SIGKILL)
            wait_for(lambda pid=pid: not is_running(pid), "the end of the worker")
            assert ask_again(service, infer_bytes(X)).json["model_version"] == "2.0.0"
        before = statistics(service)["inference_stats"]["success"]["count"]
        assert before > 0
    assert rejected(slots) == {}


def test_worker_that_is_lost_while_it_loads_the_candidate_serves_on_without_it(
    maker: PackageMaker, slots: Slots
) -> None:
    with serving(slots) as service:
        wait_for(lambda: statistics(service).get("rollout"), "the trial")
        slots.install(write(maker, slots.folder.parent, "3.0.0"))
        pid = kill(service, signal.SIGSTOP)  # it will never answer what it is asked
        model = find_model(service)
        loading = threading.Thread(target=lambda: load(service))
        loading.start()
        wait_for(lambda: service.call(lambda: is_asked(model, "3.0.0")), "the order")
        os.kill(pid, signal.SIGKILL)
        loading.join(60)
        assert "SIGKILL" in rejected(slots)["3.0.0"]
        assert_first_serves(service, slots)


def test_trials_leave_no_descriptors(maker: PackageMaker, slots: Slots) -> None:
    with serving(slots) as service:
        (pid,) = find_pids(service)

        def count() -> tuple[int, ...]:
            return tuple(len(list(Path(f"/proc/{each}/fd").iterdir())) for each in ("self", pid))

        before = count()
        for number in range(3, 7):
            slots.install(write(maker, slots.folder.parent, f"{number}.0.0"))
            assert load(service).status == 200
            assert statistics(service)["rollout"]["candidate_version"] == f"{number}.0.0"
        assert find_pids(service) == (pid,)
        wait_for(lambda: count() <= before, "all descriptors to be closed")


def is_asked(model: Any, version: str) -> bool:
    trial = model.hosted
    return trial is not None and trial.version == version and trial.worker is not None


def test_energy_that_the_service_measures_reaches_the_gates(slots: Slots) -> None:
    with serving(slots) as service:
        find = service.service.registry.models.find
        service.call(lambda: find("linear", None).trial.runner.add_energy(0.5, 0.25))

        def measured() -> bool:
            rollout = statistics(service)["rollout"]
            found = [rollout[arm]["energy_mj"] for arm in ("candidate", "current")]
            return None not in found and np.allclose(found, [500, 250], rtol=0.02)

        wait_for(measured, "the energy of both")


def test_what_is_known_of_an_isolated_model_is_that_of_one_inside(
    maker: PackageMaker, tmp_path: Path
) -> None:
    reference = {
        "samples": 8,
        "inputs": {
            "x": {"low": -1.0, "high": 1.0, "mean": 0.0, "std": 0.5, "edges": [0.0], "shares": [0.5, 0.5]}
        },
        "outputs": {},
    }
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("linear", "other"):
        write(maker, packages, "1.0.0", name=name, figures={"reference": reference})
    models = {
        "linear": ModelOptions(cache=True, isolated=True),
        "other": ModelOptions(cache=True),
    }
    config = make_config(tmp_path, models=models, drift=DriftLimits(budget_s=1.0))  # looks at every call
    with running(config, PackageFiles([packages], maker.trust)) as service:
        generator = np.random.default_rng(0)
        inputs = [generator.normal(size=(1, 4)).astype(np.float32) for _ in range(10)]
        for x in inputs * 3:
            for name in models:
                assert infer(service, x, name).status == 200
        inside = statistics(service, "other")
        assert inside["drift"]["looked_at"] == 30
        assert (inside["cache"]["hits"], inside["cache"]["misses"]) == (20, 10)

        def told() -> dict[str, Any]:
            return {key: statistics(service).get(key) for key in ("drift", "cache", "variant")}

        wait_for(lambda: told()["drift"] == inside["drift"], "the word of the worker")
        assert told()["cache"] == inside["cache"]
        assert told()["variant"] == inside["variant"]
        for family in ("cache_hits_total", "cache_misses_total", "queue_length"):
            lines = [line for line in metrics(service).splitlines() if f"edgekit_{family}{{" in line]
            assert len({line.rsplit(" ", 1)[1] for line in lines}) == 1, lines


@pytest.mark.parametrize(
    "lie",
    [
        *("tried", "promote", "beat"),
        *(pytest.param(lie, marks=pytest.mark.long) for lie in ("early", "failing", "silence")),
    ],
)
def test_worker_that_lies_about_a_trial_is_ended_alone(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    monkeypatch.setattr(worker_handle, "MODULE", "tests.service.lying_worker")
    monkeypatch.setenv("LIE", lie)
    with serving(slots, start_timeout_s=5.0) as service, asking(service, OTHER) as other:
        wait_for(lambda: "2.0.0" in rejected(slots), "the rejection")
        assert find_model(service).restarts
        current = slots.load("linear").state.current
        assert current is not None
        assert (current.version, current.health) == ("1.0.0", HEALTHY)
        assert [line[1] for line in index(service) if line[2] == "READY"] == ["1.0.0", "1.0.0"]
        wait_for(lambda: other.statuses, "an answer of the other model")
    assert (set(other.statuses), other.ends, other.wrong) == ({200}, 0, 0)


def test_trial_that_is_over_is_not_kept_until_its_time_to_begin_has_passed(slots: Slots) -> None:
    with serving(slots, SHORT, start_timeout_s=3600.0) as service:
        find = service.service.registry.models.find
        trial = service.call(lambda: weakref.ref(find("linear", None).trial.runner))
        assert isinstance(trial(), WorkerTrialRunner)
        ask_until_promoted(service)
        wait_for(lambda: trial() is None, "the end of the trial")


def test_worker_that_cannot_be_asked_rejects_nothing_and_stops_no_loading(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(WorkerHandle, "start_trial", fail)
    before = count_descriptors()
    with serving(slots) as service:
        reply = load(service)
        assert (reply.status, "Too many open files" in reply.body.decode()) == (503, True)
        assert rejected(slots) == {}
        assert ask_again(service, infer_bytes(X)).json["model_version"] == "1.0.0"
        assert load(service, "other").status == 200
        monkeypatch.undo()
        assert load(service).status == 200
        assert statistics(service)["rollout"]["candidate_version"] == "2.0.0"
    assert count_descriptors() <= before
