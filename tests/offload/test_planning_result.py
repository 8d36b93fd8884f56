"""The record of a plan survives JSON."""

import json

import pytest

from edgekit_offload.planning.result import Candidate, Certificate, PlannedMachine, PlanningResult, WinRange
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts


def test_json_of_a_result_reads_back_equal() -> None:
    local = OffloadPlan("local", PlanCosts(0.1))
    cut = OffloadPlan("cut1-int8", PlanCosts(0.02, 0.01, 1e4, 1e2), "cut1.head", "m.cut1.tail.0")
    candidates = (
        Candidate(
            kind="local",
            plan=local,
            label="measured",
            sent=(),
            latency_ms=((100.0, 100.0),),
            score=((100.0, 100.0),),
            wins=(WinRange(20, 1, 1),),
        ),
        Candidate(
            kind="cut",
            plan=cut,
            label="modelled",
            sent=(),
            latency_ms=((120.0, 60.0),),
            score=((120.0, 60.0),),
            wins=(WinRange(20, 10, 10),),
            in_table=True,
            certificate=Certificate(
                proof="dual", cost=0.06, bound=0.06, gap=0.0, placements=0, bandwidth_mbit_s=10.0, rtt_ms=20.0
            ),
        ),
    )
    machine = PlannedMachine(name="a", label="measured")
    result = PlanningResult(
        model="m.onnx",
        model_sha256="00",
        objective="latency",
        unit="ms",
        device=machine,
        server=machine,
        bandwidths_mbit_s=(1.0, 10.0),
        rtts_ms=(20.0,),
        candidates=candidates,
        table=CutTable((local, cut)),
    )
    again = from_plain(PlanningResult, json.loads(json.dumps(to_plain(result))))
    assert again == result
    assert again.best(9.0, 20.0).name == "cut1-int8"
    assert again.best(1.0, 20.0).name == "local"


@pytest.mark.parametrize("value", ["much", -5, float("nan")])
def test_cost_that_may_be_unknown_is_checked_where_it_is_known(value: object) -> None:
    assert from_plain(PlanCosts, {"device_s": 0.1, "device_j": None}).device_j is None
    with pytest.raises(ConfigError, match="device_j"):
        from_plain(PlanCosts, {"device_s": 0.1, "device_j": value})
