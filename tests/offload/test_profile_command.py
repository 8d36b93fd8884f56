"""`edgekit offload profile`: what it writes, and what it says of models that cannot be split."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner, Result
from tests.offload.export_parts import make_package
from tests.offload.machine_here import MACHINE_HERE

from edgekit_cli.offload.profile import command
from edgekit_cli.offload.source import read_named_model
from edgekit_offload.profiling.machine import Machine, RunnableGraph, profile_kernels
from edgekit_offload.profiling.model_profile import read_profile
from edgekit_offload.profiling.planning_graph import join_profiles
from edgekit_runtime.errors import CutError, ModelError, PackageError

MODELS = Path(__file__).resolve().parents[2] / "models" / "tiny"
LOOP = """
<ir_version: 8, opset_import: ["" : 17]>
g (bool c, float[2] x) => (float[2] y) {
  y = If (c) <
    then_branch = one () => (float[2] a) { a = Relu(x) },
    else_branch = other () => (float[2] b) { b = Neg(x) }
  >
}
"""

DEPENDENT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[4] x) => (float[n] y) { i = NonZero(x) f = Flatten(i) c = Cast <to = 1> (f) y = Neg(c) }
"""
SILERO = Path.home() / ".cache" / "edgekit" / "silero-vad"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(command, [*map(str, words), "--seconds", "0.1"])


@pytest.fixture
def run_here(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command with a machine that measures in this process; that of `run` starts a program."""
    monkeypatch.setattr(Machine, "parse", lambda _text: MACHINE_HERE)
    return run


def test_profile_is_written_under_the_names_of_model_and_machine(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    result = run(str(MODELS / "digits_cnn.onnx"), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["profile"] == "digits_cnn.local.profile.json"
    profile = read_profile(tmp_path / "digits_cnn.local.profile.json")
    assert document["kernels"] == len(profile.kernels) > 3
    assert document["cut_points"] >= 4


def test_slowest_kernels_are_shown(run_here: Callable[..., Result], tmp_path: Path) -> None:
    result = run_here(str(MODELS / "mnist5k_dscnn.onnx"), "--output", "p.json")
    assert result.exit_code == 0, result.output
    assert "Kernels: 13, the slowest" in result.stdout
    assert "Profile: p.json" in result.stdout


def test_model_with_control_flow_is_measured_whole(run_here: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "flow.onnx"
    path.write_bytes(onnx.parser.parse_model(LOOP).SerializeToString())
    result = run_here(str(path), "--output", str(tmp_path / "p.json"))
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "control flow" in said
    assert "whole-model candidates only" in said
    profile = read_profile(tmp_path / "p.json")
    assert profile.whole_s > 0
    assert not profile.kernels


def test_model_with_weights_beside_it_is_measured(run_here: Callable[..., Result], tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1, 64] x) => (float[1, 64] y)'
        " { h = MatMul(x, w) y = Sigmoid(h) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(64, dtype=np.float32), "w"))
    path = tmp_path / "outside.onnx"
    onnx.save(model, path, save_as_external_data=True, location="outside.weights", size_threshold=0)
    result = run_here(str(path), "--output", str(tmp_path / "p.json"))
    assert result.exit_code == 0, result.output
    assert [kernel.op for kernel in read_profile(tmp_path / "p.json").kernels] == ["MatMul", "Sigmoid"]


def test_signed_package_is_measured_on_its_golden_inputs(
    run_here: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = make_package(tmp_path)
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    model = read_named_model(package.path)
    assert model.graph.inputs["image"].shape == (1, 1, 8, 8)
    result = run_here(str(package.path), "--output", str(tmp_path / "p.json"))
    assert result.exit_code == 0, result.output
    profile = read_profile(tmp_path / "p.json")
    assert (profile.model, len(profile.kernels) > 3) == ("digits", True)


def test_package_of_a_stranger_is_not_measured(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = make_package(tmp_path)
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "empty"))
    assert isinstance(run(str(package.path)).exception, PackageError)


def test_tensors_whose_sizes_depend_on_the_data_are_named_in_the_profile(
    run_here: Callable[..., Result], tmp_path: Path
) -> None:
    path = tmp_path / "dependent.onnx"
    path.write_bytes(onnx.parser.parse_model(DEPENDENT).SerializeToString())
    result = run_here(str(path), "--output", str(tmp_path / "p.json"))
    assert result.exit_code == 0, result.output
    profile = read_profile(tmp_path / "p.json")
    assert (profile.whole_s > 0, profile.obstacle) == (True, "")
    assert "y" in profile.unsendable


def test_silero_vad_is_measured_whole(run: Callable[..., Result], tmp_path: Path) -> None:
    wheels = sorted(SILERO.glob("silero_vad-*.whl"))
    if not wheels:
        pytest.skip(f"needs the wheel of silero-vad: `pip download --no-deps silero-vad -d {SILERO}`")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        content = wheel.read("silero_vad/data/silero_vad.onnx")
    feeds = {
        "input": np.zeros((1, 576), np.float32),
        "state": np.zeros((2, 1, 128), np.float32),
        "sr": np.array(16_000, np.int64),
    }
    graph = RunnableGraph(content, {"threads": 1}, inputs=feeds)
    profile = profile_kernels(MACHINE_HERE, graph, name="silero", seconds=0.1)
    assert "control flow" in profile.obstacle
    assert profile.whole_s > 0
    with pytest.raises(CutError, match="whole-model candidates only"):
        join_profiles(content, [profile])


def test_file_that_is_no_model_is_said(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run(str(MODELS / "README.md"))
    assert isinstance(result.exception, ModelError)


def test_machine_that_is_not_there_is_said(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run(str(MODELS / "digits_cnn.onnx"), "--on", "ssh:no.such.host.invalid")
    assert isinstance(result.exception, CutError)
    assert "ssh:no.such.host.invalid" in str(result.exception)
