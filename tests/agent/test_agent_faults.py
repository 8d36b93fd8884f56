"""Kills, failed calls, full disks and power cuts over every transition of journal and slots."""

import pytest
from tests.faults.disk_calls import KINDS
from tests.faults.journal_faults import POWER_CUT, JournalBench
from tests.memory_folder import memory_folder
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.runtime.encryption_parts import make_device


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, POWER_CUT])
def test_update_interrupted_at_any_step_leaves_a_whole_model_and_is_finished_later(
    kind,
    is_encrypted,
    maker,  # noqa: F811
    is_long,
    monkeypatch,
):
    with memory_folder() as folder:
        monkeypatch.setenv("EDGEKIT_HOME", str(folder / "home"))
        bench = JournalBench(folder, maker, device_key=make_device(folder / "home") if is_encrypted else None)
        cases = bench.list_cases("two updates", [kind])
        cases = cases if is_long else cases[:: max(3, len(cases) // (10 if is_encrypted else 30))]
        for case in cases:
            bench.try_case("two updates", case, to_the_end=True)
    assert bench.outcome.wrong == []
    assert len(cases) > (60 if is_long else 5 if is_encrypted else 20)
