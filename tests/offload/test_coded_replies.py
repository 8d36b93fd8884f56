"""Large outputs come back in 8 bits with cuts that round anyway, from the split to the device's answer."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnxruntime
import pytest
from tests.free_port import free_port
from tests.offload.machine_here import MACHINE_HERE
from tests.offload.offload_service import serving
from tests.offload.onnx_models import model_of
from tests.offload.test_odd_models import run_part
from tests.offload.test_photo_offload import offloading
from tests.offload.test_planner import inputs_of, profile_of
from tests.service.serve_parts import wait_ready
from tests.waiting import wait_for

from edgekit_offload.packaging.plan_package import attach
from edgekit_offload.packaging.submodels import attach_plans
from edgekit_offload.partition.coding import Coding
from edgekit_offload.partition.opened_model import OpenedModel
from edgekit_offload.partition.split import split_model
from edgekit_offload.planning import cut_candidates
from edgekit_offload.planning.measurement import CutMeasurement
from edgekit_offload.planning.planner import plan
from edgekit_runtime.errors import BackendError
from edgekit_runtime.offload.cut_table import CutTable, read_cut_table
from edgekit_runtime.offload.latency_model import Conditions, LinkState, predict_s
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts
from edgekit_runtime.offload.session import plan_runner
from edgekit_runtime.offload.session.plan_runner import PlanRunner
from edgekit_runtime.package.archive import OpenedPackage, read_package
from edgekit_runtime.sessions import backends
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.plain_package import write_plain_package
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer

SIDE = 32


def mask_model() -> bytes:
    """A photo in, a small tensor in the middle, and a mask as large as the photo out."""
    rng = np.random.default_rng(0)
    weights = {
        "k": rng.normal(size=(4, 3, 8, 8)).astype(np.float32),
        "u": rng.normal(size=(4, 8, 8, 8)).astype(np.float32),
        "o": rng.normal(size=(8, 5)).astype(np.float32),
    }
    return model_of(
        [
            ("Conv", ["x", "k"], ["small"]),
            ("ConvTranspose", ["small", "u"], ["mask"]),
            ("GlobalAveragePool", ["mask"], ["mean"]),
            ("Flatten", ["mean"], ["flat"]),
            ("MatMul", ["flat", "o"], ["scores"]),
        ],
        {"x": ("N", 3, SIDE, SIDE)},
        ["mask", "scores"],
        weights=weights,
        attributes={0: {"strides": [8, 8]}, 1: {"strides": [8, 8]}},
    )


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_large_output_of_a_lossy_cut_comes_back_in_codes(kind: str) -> None:
    content = mask_model()
    split = split_model(content, [0], Coding(kind))  # type: ignore[arg-type]
    assert split.decoder is not None
    assert {one.name for one in split.tail.outputs} == {"mask.codes", "mask.ends", "mask.range", "scores"}
    x = np.random.default_rng(1).normal(size=(2, 3, SIDE, SIDE)).astype(np.float32)
    exact = split_model(content, [0], Coding("raw"))
    assert exact.decoder is None
    sent = run_part(split.head, {"x": x}, content)
    reply = run_part(split.tail, sent, content)
    restored = run_part(split.decoder, reply, content)["mask"]
    coded = sum(value.nbytes for name, value in reply.items() if name.startswith("mask"))
    assert coded < restored.nbytes / 2.5
    plain = split_model(content, [0, 1], Coding("raw"))
    uncoded = run_part(plain.head, {"x": x}, content)["mask"]
    if kind == "int8":
        assert np.abs(restored - uncoded).max() < 0.05 * np.ptp(uncoded)


def test_estimate_of_three_tiers_counts_the_coded_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    content, rng = mask_model(), np.random.default_rng(2)
    feeds = [{"x": rng.normal(size=(1, 3, SIDE, SIDE)).astype(np.float32)} for _ in range(3)]
    made = inputs_of(content, [0.001, 5.0, 5.0, 0.1, 0.1], [0.001] * 5, feeds)
    edge = profile_of(content, [0.001, 4.0, 4.0, 0.1, 0.1], "edge")
    replies: list[float] = []

    def predict(one: OffloadPlan, conditions: Conditions) -> float:
        replies.append(one.costs.download_bytes)
        return predict_s(one, conditions)

    monkeypatch.setattr(cut_candidates, "predict_s", predict)
    result = plan(
        replace(
            made,
            model=OpenedModel(content, run_s=1e9),
            max_loss=1.0,
            edge=edge,
            edge_link=LinkState(50e6, 50e6, 0.001),
        )
    )
    lossy = [one for one in result.tiers if one.coding != "raw" and one.kernels[0] and one.kernels[2]]
    assert lossy
    assert 0 < min(replies) < 8 * SIDE * SIDE * 4 / 2.5


def fail(*_: object) -> NoReturn:
    raise BackendError("no memory")


@pytest.fixture
def coded_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., OpenedPackage]:
    """Writes a package with the plans of the named kinds."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    generate_key("default")
    (tmp_path / "mask.onnx").write_bytes(mask_model())
    plain = write_plain_package(
        tmp_path / "mask.onnx", name="mask", target="x86-64", folder=tmp_path, sign=load_signer()
    )
    trust = TrustStore.from_folder(find_keys_folder())

    def write(*names: str) -> OpenedPackage:
        splits = {
            "coded": split_model(mask_model(), [0], Coding("int8")),
            "raw": split_model(mask_model(), [0], Coding("raw")),
        }
        plans = {
            "local": OffloadPlan("local", PlanCosts(1.0)),
            "raw": OffloadPlan("raw", PlanCosts(0.01), head="raw.head", tail="raw.tail"),
            "coded": OffloadPlan(
                "coded", PlanCosts(0.01), head="coded.head", tail="coded.tail", decoder="coded.reply.head"
            ),
        }
        table = CutTable(tuple(plans[name] for name in names))
        with read_package(plain, trust) as package:
            path = attach_plans(package, splits, table, folder=tmp_path, sign=load_signer(), version="2.0.0")
        return read_package(path, trust)

    return write


@pytest.mark.parametrize(
    ("names", "tables"),
    [
        (("coded", "local", "raw"), {"cut-table": ["local", "raw"], "coded-plans": ["coded"]}),
        (("local", "raw"), {"cut-table": ["local", "raw"]}),
        (("coded",), {"cut-table": ["coded"]}),
    ],
)
def test_plans_with_a_decoder_stand_where_earlier_devices_skip_them(
    names: tuple[str, ...], tables: dict[str, list[str]], coded_package: Callable[..., OpenedPackage]
) -> None:
    with coded_package(*names) as package:
        stored = {
            one.role: json.loads(bytes(package.read(one.path)))
            for one in package.manifest.artifacts
            if one.role in ("cut-table", "coded-plans")
        }
        table = read_cut_table(package)
    stored["cut-table"] = stored["cut-table"]["plans"]
    assert {role: [plan["name"] for plan in plans] for role, plans in stored.items()} == tables
    assert all(
        ("decoder" in plan) == (plan["name"] == "coded") for plans in stored.values() for plan in plans
    )
    assert table is not None
    assert {plan.name: plan.decoder for plan in table.plans} == {
        name: "coded.reply.head" if name == "coded" else None for name in names
    }


def test_decoder_that_fails_to_open_once_is_opened_with_the_next_request(
    coded_package: Callable[..., OpenedPackage], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(1).normal(size=(1, 3, SIDE, SIDE)).astype(np.float32)
    with coded_package("local", "coded") as package:
        table = read_cut_table(package)
        assert table is not None
        candidate = PlanRunner(next(plan for plan in table.plans if plan.tail), package, 1)
        opened: list[str] = []

        def open_choice(view: OpenedPackage, *arguments: Any) -> Session:
            opened.append(str(view.submodel))
            if opened.count("coded.reply.head") == 1 and opened[-1] == "coded.reply.head":
                fail()
            return backends.open_choice(view, *arguments)

        monkeypatch.setattr(plan_runner, "open_choice", open_choice)
        with pytest.raises(BackendError, match="no memory"):
            candidate.run_head({"x": x})
        made = candidate.run_head({"x": x})
        tail = backends.open_session(package.select_submodel("coded.tail"), threads=1)
        reply = candidate.decode(tail.run({spec.name: made[spec.name] for spec in tail.inputs}))
        tail.close()
        candidate.close()
    expected = onnxruntime.InferenceSession(mask_model()).run(["mask"], {"x": x})[0]
    np.testing.assert_allclose(reply["mask"], expected, atol=0.05 * float(np.ptp(expected)))


def test_coded_reply_is_planned_packaged_served_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    generate_key("default")
    content, rng = mask_model(), np.random.default_rng(2)
    feeds = [{"x": rng.normal(size=(1, 3, SIDE, SIDE)).astype(np.float32)} for _ in range(3)]
    (tmp_path / "mask.onnx").write_bytes(content)
    signer = load_signer()
    package = write_plain_package(
        tmp_path / "mask.onnx", name="mask", target="x86-64", folder=tmp_path, sign=signer
    )
    machine = MACHINE_HERE
    measured = CutMeasurement(
        model=OpenedModel(content), feeds=feeds, device=machine, server=machine, seconds=0.05
    )
    made = inputs_of(content, [0.001, 5.0, 5.0, 0.1, 0.1], [0.001] * 5, feeds)
    result = plan(replace(made, model=OpenedModel(content, run_s=1e9), measure=measured, max_loss=1.0))
    candidates = {candidate.name: candidate.plan for candidate in result.candidates}
    coded = next(one for one in candidates.values() if one.decoder is not None)
    raw_cuts = [one for name, one in candidates.items() if name.startswith("cut") and name.endswith("-raw")]
    exact = max(raw_cuts, key=lambda one: one.costs.download_bytes)
    assert exact.decoder is None
    assert coded.costs.download_bytes < exact.costs.download_bytes / 2.5
    (tmp_path / "plans").mkdir()
    slow = replace(candidates["local"], costs=replace(candidates["local"].costs, device_s=10.0))
    planned = attach(
        package,
        replace(result, table=CutTable((slow, coded))),
        measured.splits,
        tmp_path / "plans",
        "default",
    )
    expected = onnxruntime.InferenceSession(content).run(["mask", "scores"], feeds[0])
    port = free_port()
    with serving(tmp_path, planned, "--port", port) as process:
        wait_ready(process)
        with offloading(planned, port) as session:
            assert session.wait_for_probe(60)
            wait_for(lambda: session.decision().plan.name == coded.name, "the device to choose the cut")
            wait_for(lambda: session.run(feeds[0]) and session.counts.remote > 0, "an answer of the server")
            answer = session.run(feeds[0])
            assert session.counts.failed == 0
            monkeypatch.setattr(session.state.runners[coded.name], "decode", fail)
            np.testing.assert_allclose(session.run(feeds[0])["mask"], expected[0], atol=1e-4)
    assert set(answer) == {"mask", "scores"}
    np.testing.assert_allclose(answer["mask"], expected[0], atol=0.05 * float(np.ptp(expected[0])))
