"""The self-test of a package notices what is wrong with its model, also behind a saturated softmax."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tests.toolkit.cases import cases
from tests.toolkit.package_run import edgekit, mlp, model_of, package, read_only, saved, tensor, tiny

from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.package.golden import resample
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.selftest import read_golden, run_selftest
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.assemble import describe_artifacts
from edgekit_toolkit.packaging.golden_rows import choose_seeds, golden_rows, pack_values
from edgekit_toolkit.packaging.golden_tensors import golden_outputs
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.samples.generated import Feeds

pytestmark = pytest.mark.usefixtures("home")

CLASSES = 6


def saturated() -> onnx.ModelProto:
    """A classifier whose softmax gives one class all on nearly every input."""
    draw = np.random.default_rng(3)
    weights = {
        "a": draw.standard_normal((8, 32)).astype(np.float32),
        "b": draw.standard_normal(32).astype(np.float32),
        "c": (6 * draw.standard_normal((32, CLASSES))).astype(np.float32),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "a", "b"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "c"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["y"]),
    ]
    return model_of(nodes, [tensor("x", ["N", 8])], [tensor("y", ["N", CLASSES])], weights)


@pytest.fixture(scope="module")
def saturated_package(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a package of `saturated`."""
    folder = tmp_path_factory.mktemp("saturated")
    assert package(saved(saturated(), folder / "model.onnx"), folder / "out").code == 0
    return folder / "out"


def passes_with(folder: Path, change: Any) -> bool:
    """Change the weights of the packaged model, sign it again, and run the self-test."""
    with read_only(folder) as sound:
        path, manifest = sound.path, sound.manifest
        artifacts = {one.path: bytes(sound.read(one.path)) for one in manifest.artifacts}
    model = onnx.load_from_string(artifacts[manifest.backend.artifact])
    largest = max(model.graph.initializer, key=lambda one: one.dims[-1:] == [CLASSES] and len(one.dims) == 2)
    largest.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(largest).copy()), largest.name))
    artifacts[manifest.backend.artifact] = model.SerializeToString()
    roles = {one.path: one.role for one in manifest.artifacts}
    other = path.with_name("other.edgepkg")
    changed = replace(manifest, artifacts=describe_artifacts(artifacts, roles))
    write_package(other, changed, artifacts, load_signer())
    with read_package(other, TrustStore.from_folder(find_keys_folder())) as opened:
        passed = run_selftest(open_session(opened), opened).passed
    other.unlink()
    return passed


def test_swapped_classes_of_a_saturated_softmax_fail(saturated_package: Path) -> None:
    assert passes_with(saturated_package, lambda weight: weight)
    for first in range(CLASSES):
        for second in range(first):
            order = np.arange(CLASSES)
            order[[first, second]] = second, first
            assert not passes_with(saturated_package, lambda weight, order=order: weight[:, order])


@pytest.mark.parametrize("channel", [0, 7, 31])
def test_a_lost_channel_behind_a_saturated_softmax_fails(channel: int, saturated_package: Path) -> None:
    def lose(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        weight[channel] = 0
        return weight

    assert not passes_with(saturated_package, lose)


def test_the_recipe_holds_the_rows_and_repeats_the_package(tmp_path: Path) -> None:
    source, data = tiny("italy_power_mlp")
    made = package(source, tmp_path / "a", *data, "--budget", "drop=100%")
    assert made.code == 0
    (recipe,) = (tmp_path / "a").glob("*.recipe.json")
    rows = json.loads(recipe.read_bytes())["golden_rows"]
    with read_only(tmp_path / "a") as opened:
        golden, content = opened.manifest.golden, opened.path.read_bytes()
    assert golden.rows is not None
    assert set(golden.rows.seeds) <= set(rows)
    assert edgekit("package", source, "--recipe", recipe, "-o", tmp_path / "b").code == 0
    with read_only(tmp_path / "b") as repeated:
        assert repeated.path.read_bytes() == content


def test_the_rows_cost_a_small_package_under_a_kilobyte(tmp_path: Path) -> None:
    source, data = tiny("digits_cnn")
    assert package(source, tmp_path / "out", *data, "--budget", "drop=100%").code == 0
    with read_only(tmp_path / "out") as opened:
        rows = opened.manifest.golden.rows
        assert rows is not None
        stored = sum(one.size_bytes for one in opened.manifest.artifacts if "rows" in one.path)
    assert stored + len(json.dumps(rows.to_json())) < 700


def test_tensorrt_keeps_to_the_first_row(tmp_path: Path) -> None:
    made = package(saved(mlp(), tmp_path / "model.onnx"), tmp_path / "out", target="jetson-orin-nano")
    assert made.code == 0
    with read_only(tmp_path / "out") as opened:
        assert opened.manifest.backend.name == "tensorrt"
        assert opened.manifest.golden.rows is None


def test_integer_outputs_of_rows_are_compared_exactly(tmp_path: Path) -> None:
    model = mlp()
    model.graph.node.append(helper.make_node("ArgMax", ["y"], ["best"], axis=1))
    model.graph.output.append(tensor("best", ["N", 1], onnx.TensorProto.INT64))
    assert package(saved(model, tmp_path / "model.onnx"), tmp_path / "out").code == 0
    with read_only(tmp_path / "out") as opened:
        case = read_golden(opened)
    expected = [golden for _, row in case.rows for golden, _ in row if golden.name == "best"]
    assert {golden.dtype for golden in expected} == {"int64"}
    assert {golden.atol for golden in expected} == {0.0}


def test_a_costly_model_gets_fewer_rows() -> None:
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((8, 4))
    first = {"x": draw.standard_normal((1, 8)).astype(np.float32)}

    def run(feeds: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        return [(feeds["x"] @ weight).astype(np.float32)]

    cheap, costly = choose_seeds(run, first, macs=1e4), choose_seeds(run, first, macs=1e9)
    assert len(cheap) > len(costly) == 2


@cases(("macs", "most_runs"), [(1e9, 25), (3e9, 10), (1e11, 3), (math.inf, 3)])
def test_a_costly_model_runs_a_few_times_to_choose_its_rows(macs: float, most_runs: int) -> None:
    runs: list[dict[str, np.ndarray[Any, Any]]] = []

    def run(feeds: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        runs.append(feeds)
        return [feeds["x"] * 2]

    first = {"x": np.random.default_rng(0).standard_normal((1, 8)).astype(np.float32)}
    assert len(choose_seeds(run, first, macs=macs)) == 2
    assert len(runs) <= most_runs


def test_a_package_whose_engine_opens_fast_has_fewer_rows(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["h"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["h"], ["y"]),
    ]
    weights = {"w": np.random.default_rng(0).standard_normal((16, 16, 3, 3)).astype(np.float32)}
    model = model_of(nodes, [tensor("x", [1, 16, 52, 52])], [tensor("y", [1, 16, 1, 1])], weights)
    source, counts = saved(model, tmp_path / "model.onnx"), []
    for backend in ("ort", "litert"):
        assert package(source, tmp_path / backend, "--backend", backend).code == 0
        with read_only(tmp_path / backend) as opened:
            assert opened.manifest.golden.rows is not None
            counts.append(len(opened.manifest.golden.rows.seeds))
    assert counts == [5, 4]


def test_rows_whose_outputs_are_no_numbers_are_left_out() -> None:
    first = {"x": np.float32([[1, 2, 3, 4]])}

    def run(feeds: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        x = feeds["x"]
        return [np.where(np.rint(x[:, :1]) == 3, np.float32(np.nan), x)]

    seeds = choose_seeds(run, first, macs=1.0)
    assert seeds
    assert all(np.isfinite(run(resample(first, seed))[0]).all() for seed in seeds)


def test_sigmoid_that_rounds_near_zero_is_right_and_one_that_is_off_is_not() -> None:
    """Engines compute 0.5 + tanh(x / 2) / 2 in float32, whose error does not shrink with the score."""
    first = {"x": np.linspace(-22, -12, 4096, dtype=np.float32).reshape(1, -1)}
    feeds = resample(first, 0)["x"]
    exact = 1 / (1 + np.exp(-feeds.astype(np.float64)))
    rounded = np.float32(0.5) + np.float32(0.5) * np.tanh(feeds / np.float32(2))
    rows, _ = golden_rows(
        lambda given: [(1 / (1 + np.exp(-given["x"].astype(np.float64)))).astype(np.float32)],
        first,
        {0: [exact.astype(np.float32)]},
        ["y"],
        integer=False,
    )
    assert rows is not None
    allowed = rows.outputs[0].atol[0] + (rows.outputs[0].rtol or (0.0,))[0] * exact
    assert (np.abs(rounded - exact) <= allowed).all()
    assert (np.abs(2 * exact - exact) > allowed)[exact > 5e-7].all()


@pytest.mark.parametrize("least", [-22.0, -40.0])
def test_sigmoids_that_are_all_near_zero_may_round_in_every_row(least: float) -> None:
    first = {"x": np.linspace(least, -14, 4096, dtype=np.float32).reshape(1, -1)}

    def run(feeds: Feeds) -> list[np.ndarray[Any, np.dtype[Any]]]:
        return [(1 / (1 + np.exp(-feeds["x"].astype(np.float64)))).astype(np.float32)]

    floats = run(resample(first, 0))
    rows, _ = golden_rows(run, first, {0: floats}, ["y"], integer=False)
    (output,), _ = golden_outputs({"y": run(first)[0]}, {"y": run(first)[0]}, integer=False)
    assert rows is not None
    assert 2**-22 <= rows.outputs[0].atol[0] < 2**-21
    assert 2**-22 <= output.atol < 2**-21


def test_row_whose_jittered_input_is_refused_is_left_out() -> None:
    first = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)}
    refused = resample(first, 0)["x"]

    def run(feeds: Any) -> list[Any]:
        change = np.abs(feeds["x"] - refused).max()
        if 0 < change < 0.05:
            raise BackendError("refused")
        return [feeds["x"] * 2]

    floats = {seed: run(resample(first, seed)) for seed in range(3)}
    rows, _ = golden_rows(run, first, floats, ["y"], integer=True)
    assert rows is not None
    assert rows.seeds == (1, 2)
    assert len(rows.outputs[0].atol) == 2


def test_output_without_elements_of_a_model_in_codes_is_exact() -> None:
    first = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)}

    def run(feeds: Any) -> list[Any]:
        return [feeds["x"] * 2, np.zeros((0, 4), np.float32)]

    floats = {seed: run(resample(first, seed)) for seed in range(2)}
    rows, artifacts = golden_rows(run, first, floats, ["y", "boxes"], integer=True)
    assert rows is not None
    assert rows.outputs[1].atol == (0.0, 0.0)
    assert artifacts[rows.outputs[1].path] == b""


def test_smallest_float_stays_where_rounding_would_make_it_infinite() -> None:
    smallest = np.finfo(np.float32).min
    masked = np.float32([0.1, smallest, -np.inf, smallest])
    stored = np.frombuffer(pack_values(masked, 0.005, 0.01), "<f4")
    np.testing.assert_array_equal(stored[1:], masked[1:])
    assert stored[0] != masked[0]


def test_model_whose_masked_logits_are_the_smallest_float_is_packaged(tmp_path: Path) -> None:
    weights = {
        "w": np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32),
        "mask": np.array([[True, False, True, False]]),
        "least": np.array(np.finfo(np.float32).min),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("Where", ["mask", "z", "least"], ["y"]),
    ]
    model = model_of(nodes, [tensor("x", [1, 8])], [tensor("y", [1, 4])], weights)
    assert package(saved(model, tmp_path / "model.onnx"), tmp_path / "out").code == 0
