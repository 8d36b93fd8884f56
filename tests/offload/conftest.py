import pytest

from edgekit_offload.partition import opened_model
from edgekit_runtime.offload.measurement import job_runner


@pytest.fixture(scope="module", autouse=True)
def _copies(copied_children: None) -> None:
    """Each file has copies: commands prove packages and measure devices in children."""


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in this process without the pauses that let a processor become cold: no time decides a test."""
    for module in (job_runner, opened_model):
        monkeypatch.setattr(module, "PAUSE_S", 0.0)
