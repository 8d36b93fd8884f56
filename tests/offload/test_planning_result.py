"""The record of a plan survives JSON."""

import json

from edgekit_offload.planning.result import Candidate, Certificate, PlannedMachine, PlanningResult, WinRange
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.offload.cut_table import CutTable, OffloadPlan, PlanCosts


def test_json_of_a_result_reads_back_equal() -> None:
    local = OffloadPlan("local", PlanCosts(0.1))
    cut = OffloadPlan("cut1-int8", PlanCosts(0.02, 0.01, 1e4, 1e2), "cut1.head", "m.cut1.tail.0")
    candidates = (
        Candidate("local", local, "measured", (), ((100.0, 100.0),), ((100.0, 100.0),),
            (WinRange(20, 1, 1),)),
        Candidate("cut", cut, "modelled", (), ((120.0, 60.0),), ((120.0, 60.0),),
            (WinRange(20, 10, 10),), True,
            certificate=Certificate("dual", 0.06, 0.06, 0.0, 0, 10.0, 20.0)),
    )  # fmt: skip
    machine = PlannedMachine("a", "measured")
    result = PlanningResult(
        "m.onnx",
        "00",
        "latency",
        "ms",
        machine,
        machine,
        (1.0, 10.0),
        (20.0,),
        candidates,
        CutTable((local, cut)),
    )
    again = from_plain(PlanningResult, json.loads(json.dumps(to_plain(result))))
    assert again == result
    assert again.best(9.0, 20.0).name == "cut1-int8"
    assert again.best(1.0, 20.0).name == "local"
