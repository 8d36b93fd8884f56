"""Cascades from the command line to the answer: a small model on the device asks a trained one."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from tests.free_port import free_port
from tests.offload.machine_here import MACHINE_HERE
from tests.offload.offload_service import serving
from tests.offload.test_three_tiers import offloading
from tests.service.serve_parts import wait_ready
from tests.waiting import wait_for

from edgekit_cli.cli import cli
from edgekit_cli.offload import plan_request
from edgekit_offload.partition.opened_model import OpenedModel
from edgekit_offload.planning import measurement
from edgekit_offload.planning.result import PlanningResult
from edgekit_offload.profiling import machine as machines
from edgekit_offload.profiling.machine import Machine, RunnableGraph
from edgekit_offload.profiling.model_profile import ModelProfile
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.offload.measurement.job import Timing
from edgekit_runtime.offload.measurement.request_cost import RequestCost
from edgekit_toolkit.packaging.plain_package import write_plain_package
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer

TINY = Path(__file__).parents[2] / "models" / "tiny"
LARGE = TINY / "mnist5k_dscnn.onnx"
AGREEMENT = 0.9
WHOLE_S = {"ssh:device": 10.0, "ssh:cloud": 0.001}  # made up, so that no timing decides


def images(name: str) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = np.load(TINY / f"mnist5k_dscnn.{name}.npz")["image"]
    return found


def answers(model: bytes, given: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    session = onnxruntime.InferenceSession(model)
    return np.concatenate([session.run(None, {"image": one[None]})[0] for one in given])


def linear_model(weight: np.ndarray[Any, Any]) -> bytes:
    """Scores of classes as sums over pixels."""
    like = onnx.load(LARGE)
    nodes = [helper.make_node("Flatten", ["image"], ["f"]), helper.make_node("MatMul", ["f", "w"], ["s"])]
    given = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 28, 28])
    made = helper.make_tensor_value_info("s", TensorProto.FLOAT, ["N", 10])
    graph = helper.make_graph(nodes, "g", [given], [made], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=like.opset_import, ir_version=like.ir_version)
    return bytes(model.SerializeToString())


def fit() -> np.ndarray[Any, Any]:
    """Return the weights that give the answers of the large model in the least squares."""
    given = images("calib")
    wanted = np.eye(10)[answers(LARGE.read_bytes(), given).argmax(axis=1)]
    pixels = given.reshape(len(given), -1).astype(np.float64)
    ridge = pixels.T @ pixels + 10.0 * np.eye(pixels.shape[1])
    return np.asarray(np.linalg.solve(ridge, pixels.T @ wanted), np.float32)


def fake_profile(
    machine: Machine, graph: RunnableGraph, *, name: str = "model", seconds: float = 1.0
) -> ModelProfile:
    real = machines.profile_kernels(MACHINE_HERE, graph, name=name, seconds=0.01)
    whole_s = WHOLE_S[machine.text]
    kernels = tuple(replace(one, seconds=one.seconds * whole_s / real.whole_s) for one in real.kernels)
    return replace(
        real, measured_on=machine.text, kernels=kernels, whole_s=whole_s, request=RequestCost(0.0, 0.0)
    )


def fake_times(machine: Machine, graphs: Sequence[RunnableGraph], *, seconds: float) -> tuple[Timing, ...]:
    """A graph with convolutions takes as long as the whole model; others code."""
    del seconds
    heavy = [one.content and b"Conv" in one.content for one in graphs]
    return tuple(Timing(WHOLE_S[machine.text] if is_heavy else 1e-4, 0.0, 1) for is_heavy in heavy)


def plan_cascade(folder: Path, monkeypatch: pytest.MonkeyPatch, small: bytes) -> PlanningResult:
    """Plan a package with a cascade, into `folder/plans`."""
    monkeypatch.setenv("EDGEKIT_HOME", str(folder))
    monkeypatch.setenv("EDGEKIT_CACHE", str(folder / "cache"))
    monkeypatch.setattr(plan_request, "profile_kernels", fake_profile)
    monkeypatch.setattr(measurement, "time_models", fake_times)
    # Coding here is as fast as in the profiles.
    monkeypatch.setattr(OpenedModel, "run_seconds", lambda model, _: 1e-5 if model.content == small else 1.0)
    generate_key("default")
    package = write_plain_package(LARGE, name="digits", target="x86-64", folder=folder, sign=load_signer())
    (folder / "small.onnx").write_bytes(small)
    np.savez(folder / "samples.npz", image=images("eval")[:400])
    options = {
        "--device": "ssh:device", "--server": "ssh:cloud", "--rtt": "1000", "--bandwidth": "1",
        "--samples": folder / "samples.npz", "--cascade": folder / "small.onnx", "--agreement": AGREEMENT,
        "--classes": "logits", "-o": folder / "plans",
    }  # fmt: skip
    arguments = ["offload", "plan", str(package), *(str(one) for pair in options.items() for one in pair)]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False, standalone_mode=False)
    assert done.exception is None
    return from_plain(
        PlanningResult, json.loads((folder / "plans" / f"{package.stem}.plan.json").read_text())
    )


def test_cascade_is_planned_packaged_served_and_asks_where_it_is_unsure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = plan_cascade(tmp_path, monkeypatch, linear_model(fit()))
    (candidate,) = [one for one in result.candidates if one.kind == "cascade"]
    assert candidate.in_table, candidate.explanation
    assert {one.coding for one in candidate.sent} & {
        "uint8",
        "jpeg:90",
        "webp:80",
    }  # the escalation sends codes
    escalation = candidate.plan.escalation
    assert escalation is not None
    assert 0.02 < escalation.share < 0.9
    (package,) = (tmp_path / "plans").glob("*.edgepkg")
    fresh = images("eval")[400:500]
    wanted = answers(LARGE.read_bytes(), fresh).argmax(axis=1)
    port = free_port()
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(serving(tmp_path, package, "--port", port))
        wait_ready(process)
        session = stack.enter_context(offloading(package, port, candidate.name))
        wait_for(lambda: session.decision().plan.name == candidate.name, "the cascade to be proved")
        found = [session.run({"image": one[None]}) for one in fresh]
        counts = session.counts
    assert {name for one in found for name in one} == {"logits"}
    classes = np.array([one["logits"].argmax() for one in found])
    # 90 % with a confidence of 95 %; of 100 others 80 % is a failure of the threshold, not of chance.
    assert (classes == wanted).mean() >= AGREEMENT - 0.1
    assert counts.failed == 0
    assert counts.local + counts.remote + counts.hedged == len(fresh)
    assert counts.remote == pytest.approx(escalation.share * len(fresh), abs=20)


def test_weak_small_model_is_refused_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = np.random.default_rng(0).normal(size=(784, 10)).astype(np.float32)
    result = plan_cascade(tmp_path, monkeypatch, linear_model(noise))
    assert all(one.kind != "cascade" for one in result.candidates)
    (reason,) = [one.reason for one in result.refusals if one.name == "cascade"]
    assert reason.endswith(".")
    assert reason.count(". ") == 0
    assert "too weak" in reason
