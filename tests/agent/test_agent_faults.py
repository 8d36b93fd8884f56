"""Kills, failed calls, full disks and power cuts over every transition of journal and slots."""

import pytest
from tests.faults.disk_calls import KINDS
from tests.faults.journal_faults import POWER_CUT, JournalBench, Outcome
from tests.memory_folder import memory_folder
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.runtime.encryption_parts import make_device

ALL_KINDS = (*KINDS, POWER_CUT)


@pytest.fixture(scope="module", params=[False, True])
def listed(request, maker):  # noqa: F811
    """A bench, and the faults of two updates on it; whether its packages are encrypted."""
    with memory_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_HOME", str(folder / "home"))
        bench = JournalBench(
            folder, maker, device_key=make_device(folder / "home") if request.param else None
        )
        yield bench, bench.list_cases("two updates", ALL_KINDS), request.param


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_update_interrupted_at_any_step_leaves_a_whole_model_and_is_finished_later(kind, listed, is_long):
    bench, cases, is_encrypted = listed
    cases = [case for case in cases if case[0] == kind]
    cases = cases if is_long else cases[:: max(3, len(cases) // (10 if is_encrypted else 30))]
    bench.outcome = Outcome()
    for case in cases:
        bench.try_case("two updates", case, to_the_end=True)
    assert bench.outcome.wrong == []
    assert len(cases) > (60 if is_long else 5 if is_encrypted else 20)
