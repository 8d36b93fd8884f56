"""Packages for OpenVINO, and 7-bit weights for x86 processors without VNNI."""

import contextlib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.package_run import mlp, package, read_only, samples, saved, tensor, tiny

from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.engines import openvino as engine
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.ort_options import stated_options
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.pipeline.request import Request
from edgekit_toolkit.pipeline.run import JudgedCandidate, Run
from edgekit_toolkit.pipeline.search import search
from edgekit_toolkit.quantize.forms import BFLOAT16_ARITHMETIC, STATIC_INT8
from edgekit_toolkit.selection.budget import parse_budget
from edgekit_toolkit.targets.loader import load_target
from edgekit_toolkit.targets.spec import Target

pytestmark = pytest.mark.usefixtures("home")
needs_openvino = pytest.mark.skipif(
    find_spec("openvino") is None, reason="OpenVINO is not installed: pip install openvino"
)


def run_search(tmp_path: Path, target: Target, backend: str) -> Run:
    np.savez(tmp_path / "calibration.npz", **samples(32, 1))
    np.savez(tmp_path / "evaluation.npz", **samples(64, 2))
    request = Request(
        model=saved(mlp(1), tmp_path / "net.onnx"),
        target=target,
        budget=parse_budget("drop=50%"),
        name="net",
        version="1.0.0",
        calibration=tmp_path / "calibration.npz",
        evaluation=tmp_path / "evaluation.npz",
        threads=1,
        search_s=0.0,
        backend=backend,
    )
    return search(request, load_signer(), lambda *_: None)


def peaks(run: Run) -> dict[str, int]:
    """Name of each static form -> largest code of its weights."""
    static = (candidate for candidate in run.candidates if candidate.form.kind == STATIC_INT8)
    return {candidate.label: largest_code(candidate) for candidate in static}


def largest_code(candidate: JudgedCandidate) -> int:
    assert isinstance(candidate.model, OnnxModel)
    tensors = map(numpy_helper.to_array, candidate.model.proto.graph.initializer)
    return max(int(np.abs(tensor.astype(np.int16)).max()) for tensor in tensors if tensor.dtype == np.int8)


@needs_openvino
def test_package_is_judged_made_and_run_on_openvino(tmp_path: Path) -> None:
    source, data = tiny("italy_power_mlp")
    options = ("--backend", "openvino", *data, "--json")
    report = package(source, tmp_path, *options).json
    assert report["target"]["backend"] == "openvino"
    with read_only(tmp_path) as opened:
        score = opened.manifest.figures["score"]
        assert isinstance(score, dict)
        assert score["engine"] == "OpenVINO"
        assert [choice.name for choice in opened.manifest.backend.chain] == ["openvino"]
        with contextlib.closing(open_session(opened)) as session:
            (spec,) = session.inputs
            shape = [1 if isinstance(size, str) else size for size in spec.shape]
            (output,) = session.run({spec.name: np.zeros(shape, np.float32)}).values()
            assert np.isfinite(output).all()


@needs_openvino
def test_form_in_bfloat16_passes_its_self_test_on_processors_with_and_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgekit_runtime.sessions import openvino

    if not openvino.computes_bfloat16():
        pytest.skip("this processor has no bfloat16 arithmetic")
    run = run_search(tmp_path, load_target("x86-64"), "openvino")
    (candidate,) = (entry for entry in run.candidates if entry.form.kind == BFLOAT16_ARITHMETIC)
    keys = tmp_path / "keys"
    path = tmp_path / "net.edgepkg"
    write_package(path, candidate.package.manifest, candidate.package.artifacts, load_signer(folder=keys))
    with read_package(path, TrustStore.from_folder(keys)) as opened:
        assert opened.manifest.backend.options["precision"] == "bfloat16"
        for has_bfloat16 in (True, False):
            monkeypatch.setattr(openvino, "computes_bfloat16", lambda has=has_bfloat16: has)
            with contextlib.closing(open_session(opened)) as session:
                assert run_selftest(session, opened).passed


@needs_openvino
def test_bfloat16_is_no_form_where_neither_its_times_nor_its_outputs_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Targets without bfloat16 gain nothing; a class of ArgMax that differs fails their self-test."""
    monkeypatch.setattr(engine, "computes_bfloat16", lambda: True)
    classes = mlp(1)
    classes.graph.node.append(helper.make_node("ArgMax", ["y"], ["class"]))
    classes.graph.output[0].CopyFrom(tensor("class", [1, 4], TensorProto.INT64))

    def lists_bfloat16(model: onnx.ModelProto, target: str) -> bool:
        quantizer = engine.SUPPORT.maker.open_quantizer(
            OnnxModel(model), load_target(target), threads=1, dims={}, feeds=()
        )
        return BFLOAT16_ARITHMETIC in quantizer.labels

    assert lists_bfloat16(mlp(1), "x86-64")
    assert not lists_bfloat16(classes, "x86-64")
    assert not any(lists_bfloat16(mlp(1), target) for target in ("x86-64-avx2", "rpi5"))


@needs_openvino
def test_openvino_takes_part_where_it_is_installed(tmp_path: Path) -> None:
    source, data = tiny("italy_power_mlp")
    report = package(source, tmp_path, "--backend", "auto", *data, "--json", target="rpi5").json
    assert {standing["backend"] for standing in report["tournament"]} >= {"ort", "openvino"}


@needs_openvino
def test_openvino_has_only_7_bits_without_vnni(tmp_path: Path) -> None:
    run = run_search(tmp_path, load_target("x86-64-avx2"), "openvino")
    assert {*peaks(run).values()} == {63}


def test_target_without_vnni_has_forms_of_7_bits_and_of_8(tmp_path: Path) -> None:
    run = run_search(tmp_path, load_target("x86-64-avx2"), "ort")
    found = peaks(run)
    assert {*found.values()} == {63, 127}
    for candidate in run.candidates:
        if candidate.label in found:
            assert isinstance(candidate.model, OnnxModel)
            is_narrow = found[candidate.label] == 63
            assert ("7-bit weights" in candidate.label) == is_narrow
            assert ("narrow_weights" in stated_options(candidate.model.proto)) == is_narrow


def test_target_with_vnni_has_forms_of_8_bits(tmp_path: Path) -> None:
    run = run_search(tmp_path, load_target("x86-64"), "ort")
    assert {*peaks(run).values()} == {127}


def test_threads_of_a_recipe_are_stated_in_the_package_and_repeat(tmp_path: Path) -> None:
    from edgekit_toolkit.packaging.assemble import assemble, with_threads

    run = run_search(tmp_path, load_target("x86-64"), "ort")
    floats = run.candidates[0]
    stating, recipe = with_threads(floats.package, floats.recipe, 1)
    assert stating.manifest.backend.options["threads"] == 1
    again = assemble(recipe, run.prepared.golden, floats.model)
    assert again.manifest.to_bytes() == stating.manifest.to_bytes()
    assert b"threads" not in replace(recipe, threads=None).to_bytes()
