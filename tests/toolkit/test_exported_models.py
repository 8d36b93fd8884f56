"""Models as exporters write them go through package, verify and one request to a service.

`benchmarks/exported_models.py` takes hundreds of them, for both engines, and plans an offload of each.
"""

from pathlib import Path

import pytest
from benchmarks.exported_models import ENGINES, GOOD, Trial
from tests.toolkit.exporter_kinds import KINDS

# The others are in `test_data_dependent_models.py`, or in the benchmark alone.
SAMPLED = ("language", "masked", "odd_outputs", "branching", "hostile_names", "converted")


@pytest.mark.usefixtures("new_home")
@pytest.mark.parametrize("kind", SAMPLED)
def test_exported_model_is_packaged_and_served_or_refused_by_name(kind: str, tmp_path: Path) -> None:
    number = [*KINDS].index(kind)
    results = [*Trial(number, tmp_path).results(engines=ENGINES[number % 2 :][:1], with_plan=False)]
    assert [result for result in results if result.outcome not in GOOD] == []
    assert len(results) == 3 or results[0].outcome == "refused"


@pytest.mark.usefixtures("new_home")
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (79, "data_dependent"),  # onnxruntime ended the process over a quantized product without elements
        (47, "half"),  # warnings of numpy: a logarithm of 0 and ranges beyond float16
    ],
)
def test_exported_model_that_ended_or_soiled_the_command_is_packaged(
    number: int, kind: str, tmp_path: Path
) -> None:
    results = [*Trial(number, tmp_path).results(engines=("ort",), with_plan=False)]
    assert {result.kind for result in results} == {kind}
    assert [result.outcome for result in results] == ["ok", "ok", "ok"]


@pytest.mark.usefixtures("new_home")
def test_offload_of_a_model_with_an_empty_cache_is_planned(tmp_path: Path) -> None:
    (result,) = Trial(60, tmp_path).results(engines=())
    assert (result.kind, result.step, result.outcome) == ("cached", "plan", "ok")
