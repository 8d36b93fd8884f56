"""Objectives and codings are rows of tables: one more row is planned, extracted, chosen and shown."""

from dataclasses import replace

import numpy as np
import pytest
from tests.offload.onnx_models import model_of
from tests.offload.test_odd_models import measure_here
from tests.offload.test_planner import inputs_of, narrowing_model, noise

from edgekit_cli.offload.plan import command
from edgekit_offload.partition.coding import CUT_CODINGS, CutCoding
from edgekit_offload.partition.opened_model import OpenedModel
from edgekit_offload.planning.coding_costs import TensorCoder
from edgekit_offload.planning.costs import DeviceLimits
from edgekit_offload.planning.measurement import CutMeasurement
from edgekit_offload.planning.planner import plan
from edgekit_offload.profiling.machine import Machine
from edgekit_offload.report.plan_page import render_plan_page
from edgekit_runtime.offload import choose
from edgekit_runtime.offload.latency_model import Conditions, LinkState
from edgekit_runtime.offload.objectives import OBJECTIVES, SERVER_SECONDS, Objective


def test_objective_added_as_a_row_is_planned_shown_and_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Objective(
        goal="least server time",
        unit="server ms",
        figure="{cost:.3g} ms of the server",
        ribbon="The ribbon shows what takes the server least.",
        stages=lambda *_watts: (SERVER_SECONDS,),
        score=lambda candidate, *_: candidate.costs.server_s,
    )
    monkeypatch.setitem(OBJECTIVES, "server", row)
    content = narrowing_model(16, 64)
    made = inputs_of(content, [0.005, 0.05, 0.5], [0.001, 0.002, 0.002], noise(16, 64))
    result = plan(replace(made, objective="server"))
    assert result.unit == "server ms"
    assert {result.best(mbit_s, 20.0).name for mbit_s in result.bandwidths_mbit_s} == {"local"}
    split = plan(replace(made, objective="server", limits=DeviceLimits(weights_bytes=17_000.0)))
    served = {one.name: one.plan.costs.server_s for one in split.candidates}
    assert split.best(10.0, 20.0).name == min(served, key=served.__getitem__)
    assert "what takes the server least" in render_plan_page(split)
    link = LinkState(10e6, 10e6, 0.02)
    assert "least server time" in choose.choose(split.table, Conditions(link)).reason


def test_command_has_the_objectives_of_the_table() -> None:
    (option,) = [one for one in command.params if one.name == "objective"]
    assert option.type.to_info_dict()["choices"] == (*OBJECTIVES,)


def test_coding_added_as_a_row_is_measured_and_extracted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CUT_CODINGS, "int2", CutCoding(bits=2, group=32, min_samples=100, max_cuts=1))
    values = np.random.default_rng(0).uniform(-1, 3, (2, 3, 33)).astype(np.float32)
    restored = TensorCoder("int2").restore(values)
    assert float(np.abs(values - restored).max()) <= 4 / 3 / 2 + 1e-3  # half a step of the widest range
    content, feeds = narrowing_model(16, 64), noise(16, 64)
    machine = Machine("local", (), execute=measure_here)
    measured = CutMeasurement(
        model=OpenedModel(content), feeds=feeds, device=machine, server=machine, seconds=0.05
    )
    made = inputs_of(content, [0.005, 0.5, 0.5], [0.001, 0.002, 0.002], feeds)
    result = plan(replace(made, measure=measured, max_loss=1.0))
    uploads = {
        one.sent[0].coding: one.plan.costs.upload_bytes
        for one in result.candidates
        if one.kind == "cut" and one.sent[0].name == "t1"
    }
    assert uploads["int2"] < uploads["int4"] < uploads["int8"] < uploads["raw"]
    assert any("-int2" in one for one in result.warnings) == any("-int4" in one for one in result.warnings)


def test_cut_that_is_the_same_in_all_codings_is_one_candidate() -> None:
    rng = np.random.default_rng(0)
    content = model_of(
        [
            ("MatMul", ["t0", "w1"], ["t1"]),
            ("ArgMax", ["t1"], ["t2"]),
            ("Cast", ["t2"], ["t3"]),
            ("MatMul", ["t3", "w2"], ["t4"]),
        ],
        {"t0": (1, 4096)},
        ["t4"],
        weights={
            "w1": rng.normal(size=(4096, 8)).astype(np.float32),
            "w2": rng.normal(size=(1, 4)).astype(np.float32),
        },
        attributes={1: {"axis": 1}, 2: {"to": 1}},
    )
    feeds = [{"t0": rng.normal(size=(1, 4096)).astype(np.float32)} for _ in range(3)]
    result = plan(inputs_of(content, [1e-4, 1e-4, 3.0, 5.0], [1e-4, 5.0, 1e-4, 1e-4], feeds))
    behind_argmax = [one.name for one in result.candidates if [t.name for t in one.sent] == ["t2"]]
    assert len(behind_argmax) == 1
    assert behind_argmax[0].endswith("-raw")
