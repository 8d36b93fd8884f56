"""`edgekit package --state`: models whose outputs feed their inputs, packaged on sequences."""

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto
from tests.toolkit.cases import cases
from tests.toolkit.package_run import Outcome, check_refused, edgekit, package, read_only, saved, stored
from tests.toolkit.sequence_models import (
    HIDDEN,
    draw_words,
    make_copies,
    make_hidden,
    make_lstm,
    make_spotter,
    store_words,
)

from edgekit_runtime.package.states import StateInputs
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.row_independence import rows_are_independent
from edgekit_runtime.sessions.selftest import read_golden
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.importers.source import load_model
from edgekit_toolkit.importers.states import propose_states

SILERO = Path.home() / ".cache" / "edgekit" / "silero-vad"
LOOSE = ("--budget", "drop=50%,size=10MB")


@pytest.fixture(scope="module")
def spotter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Return the model, the folder of its package, and its report."""
    folder = tmp_path_factory.mktemp("spotter")
    model = saved(make_spotter(), folder / "spotter.onnx")
    data = (
        "--calibration",
        store_words(folder / "c.npz", 24, 11),
        "--eval",
        store_words(folder / "e.npz", 80, 12),
    )
    outcome = package(model, folder / "out", "--state", "hn=h0", *data, *LOOSE, "--json")
    assert outcome.code == 0, outcome.stderr
    return model, folder / "out", outcome.json


def test_the_manifest_names_the_states(spotter: tuple[Path, Path, Any]) -> None:
    with read_only(spotter[1]) as opened:
        assert [(state.output, state.input) for state in opened.manifest.states] == [("hn", "h0")]
        golden = {tensor.name: tensor.shape for tensor in opened.manifest.golden.inputs}
    assert golden == {"x": (1, 8), "h0": (1, HIDDEN)}


def test_inspect_shows_the_states(spotter: tuple[Path, Path, Any]) -> None:
    (path,) = spotter[1].glob("*.edgepkg")
    assert "hn is h0 of the next run" in " ".join(edgekit("inspect", path).stdout.split())


def test_samples_are_judged_by_the_last_step_of_their_sequence(spotter: tuple[Path, Path, Any]) -> None:
    words, labels = draw_words(80, 12)
    session = onnxruntime.InferenceSession(str(spotter[0]))
    state = np.zeros((80, HIDDEN), np.float32)
    for x in words.swapaxes(0, 1):
        scores, state = session.run(None, {"x": x, "h0": state})
    with read_only(spotter[1]) as opened:
        score = opened.manifest.figures["score"]
    half = score["samples"]  # type: ignore[index, call-overload]  # of a manifest
    assert score["source_value"] > 0.8  # type: ignore[index, call-overload, operator]
    correct = np.asarray(scores).argmax(axis=1) == labels
    assert half == 40
    assert abs(float(score["source_value"]) - correct.mean()) < 0.1  # type: ignore[index, call-overload, arg-type]


def test_ranges_of_states_come_from_sequences(spotter: tuple[Path, Path, Any]) -> None:
    with read_only(spotter[1]) as opened:
        reference: Any = opened.manifest.figures["reference"]
    state = reference["inputs"]["h0"]
    assert state["low"] < -0.8
    assert state["high"] > 0.8


def test_the_report_says_that_samples_are_sequences(spotter: tuple[Path, Path, Any]) -> None:
    assert any("each sample is a sequence of its own" in text for text in spotter[2]["warnings"])


def test_run_gives_the_outputs_of_all_steps(spotter: tuple[Path, Path, Any], tmp_path: Path) -> None:
    data = store_words(tmp_path / "words.npz", 3, 5, steps=6)
    with np.load(data) as arrays:
        data = stored(tmp_path / "words.npz", {"x": arrays["x"]})
    (path,) = spotter[1].glob("*.edgepkg")
    outcome = edgekit("run", path, "--input", data, "--json")
    assert outcome.code == 0, outcome.stderr
    assert [(output["name"], output["shape"]) for output in outcome.json["outputs"]] == [
        ("scores", [3, 6, 4])
    ]


def test_a_recipe_makes_the_same_package(spotter: tuple[Path, Path, Any], tmp_path: Path) -> None:
    model, folder, _ = spotter
    (recipe,) = folder.glob("*.recipe.json")
    assert edgekit("package", model, "--recipe", recipe, "-o", tmp_path).code == 0
    digests = [
        hashlib.sha256(path.read_bytes()).digest()
        for place in (folder, tmp_path)
        for path in place.glob("*.edgepkg")
    ]
    assert digests[0] == digests[1]


def test_a_model_without_data_runs_generated_sequences(tmp_path: Path) -> None:
    model = saved(make_lstm(), tmp_path / "lstm.onnx")
    outcome = package(model, tmp_path / "out", "--state", "hn=h0", "--state", "cn=c0", "--json")
    assert outcome.code == 0, outcome.stderr
    assert any("128 steps of 16 sequences calibrate" in text for text in outcome.json["warnings"])
    with read_only(tmp_path / "out") as opened:
        shapes = {spec.name: spec.shape for spec in (*opened.manifest.inputs, *opened.manifest.outputs)}
        assert shapes["h0"] == shapes["cn"] == ("batch", 1, 5)
        _compare_with_source(opened, model)


def _compare_with_source(opened: Any, model: Path) -> None:
    """Run sequences of two rows through a package, and through the model with its own layout of states."""
    session, source = open_session(opened), onnxruntime.InferenceSession(str(model))
    states = StateInputs(opened.manifest.states, opened.manifest.inputs)
    stored_states, h, c = None, np.zeros((1, 2, 5), np.float32), np.zeros((1, 2, 5), np.float32)
    for step in range(4):
        x = np.random.default_rng(step).normal(0, 1, (2, 3)).astype(np.float32)
        outputs = session.run(states.complete({"x": x}, stored_states))
        stored_states = states.take(outputs)
        y, h, c = source.run(None, {"x": x, "h0": h, "c0": c})
        np.testing.assert_allclose(outputs["y"], y, atol=0.01)


def test_silero_vad_answers_as_before_packaging(tmp_path: Path) -> None:
    wheels = sorted(SILERO.glob("silero_vad-*.whl"))
    if not wheels:
        pytest.skip(f"needs the wheel of silero-vad: `pip download --no-deps silero-vad -d {SILERO}`")
    model = tmp_path / "silero_vad.onnx"
    with zipfile.ZipFile(wheels[-1]) as wheel:
        model.write_bytes(wheel.read("silero_vad/data/silero_vad.onnx"))
    options = ("--fix", "sr=16000", "--state", "stateN=state", "--dim", "input_1=576")
    outcome = package(model, tmp_path / "out", *options)
    assert outcome.code == 0, outcome.stderr
    source = onnxruntime.InferenceSession(str(model))
    stored_states, state = None, np.zeros((2, 2, 128), np.float32)
    with read_only(tmp_path / "out") as opened:
        session = open_session(opened)
        assert rows_are_independent(session, read_golden(opened).inputs)
        assert getattr(session, "has_fixed_work", False)
        states = StateInputs(opened.manifest.states, opened.manifest.inputs)
    for step in range(20):
        chunk = np.random.default_rng(step).normal(0, 0.1, (2, 576)).astype(np.float32)
        outputs = session.run(states.complete({"input": chunk}, stored_states))
        stored_states = states.take(outputs)
        expected, state = source.run(None, {"input": chunk, "state": state, "sr": np.array(16000)})
        np.testing.assert_allclose(outputs["output"], expected, atol=0.01)


def test_files_of_one_sequence_each_may_have_any_length(tmp_path: Path) -> None:
    model = saved(make_spotter(), tmp_path / "spotter.onnx")
    folder = tmp_path / "words"
    folder.mkdir()
    for index, steps in enumerate((5, 9, 7, 5)):
        stored(folder / f"{index}.npz", {"x": draw_words(1, index, steps)[0][0]})
    outcome = package(model, tmp_path / "out", "--state", "hn=h0", "--calibration", folder, *LOOSE, "--json")
    assert outcome.code == 0, outcome.stderr


def test_samples_of_one_step_are_warned_of(tmp_path: Path) -> None:
    model = saved(make_spotter(), tmp_path / "spotter.onnx")
    data = store_words(tmp_path / "c.npz", 20, 1, steps=1)
    outcome = package(model, tmp_path / "out", "--state", "hn=h0", "--calibration", data, *LOOSE, "--json")
    assert any("the states are zeros in every step" in text for text in outcome.json["warnings"])


def test_ranges_of_single_steps_lose_what_those_of_sequences_keep(
    spotter: tuple[Path, Path, dict[str, Any]], tmp_path: Path
) -> None:
    def drop(report: dict[str, Any]) -> float:
        (candidate,) = (
            candidate
            for candidate in report["candidates"]
            if candidate["label"] == "int8 per-channel, all layers"
        )
        return float(candidate["figures"]["drop"]["value"])

    data = store_words(tmp_path / "c.npz", 200, 11, steps=1)
    options = ("--calibration", data, "--eval", spotter[0].parent / "e.npz", *LOOSE, "--json")
    single_steps = package(spotter[0], tmp_path / "out", "--state", "hn=h0", *options).json
    print("drop of int8 in points, ranges from sequences and from single steps:")
    print(drop(spotter[2]), drop(single_steps))
    assert drop(spotter[2]) < 3
    assert drop(single_steps) > drop(spotter[2]) + 3


def test_a_pair_that_looks_like_a_state_is_proposed(tmp_path: Path) -> None:
    outcome = package(saved(make_lstm(), tmp_path / "lstm.onnx"), tmp_path / "out", "--json")
    texts = " ".join(outcome.json["warnings"])
    assert "--state hn=h0" in texts
    assert "--state cn=c0" in texts
    assert "=x" not in texts


@cases(
    ("target", "output"),
    [
        *(("h0", "hn"), ("state", "stateN"), ("past_h", "present_h"), ("cache_in", "cache_out")),
        *(("h_prev", "h_next"), ("hidden", "new_hidden"), ("in_state", "out_state"), ("h", "h_out")),
    ],
)
def test_names_of_states_are_known_apart_from_others(target: str, output: str) -> None:
    inputs = [TensorSpec("input", "float32", ("N", 4)), TensorSpec(target, "float32", ("N", 4))]
    outputs = [TensorSpec("output", "float32", ("N", 4)), TensorSpec(output, "float32", ("N", 4))]
    (state,) = propose_states(inputs, outputs, ())
    assert (state.output, state.input) == (output, target)
    assert not propose_states(inputs, outputs, [state])


@cases(
    ("model", "options", "message"),
    [
        (make_copies(["batch", 4], ["batch", 4]), ["out=past"], "no input is named 'past'"),
        (make_copies(["batch", 4], ["batch", 4]), ["next=state"], "no output is named 'next'"),
        (make_copies(["batch", 4], ["batch", 5]), ["out=state"], r"is float32 \['batch', 5\], but input"),
        (
            make_copies(["batch", 4], ["batch", 4], TensorProto.DOUBLE),
            ["out=state"],
            "output 'out' is float64",
        ),
        (make_copies(["batch", "past"], ["batch", "all"]), ["out=state"], "tells the size of 'past'"),
        (make_copies(["batch", 4], ["batch", 4]), ["y=state", "out=state"], "'state' stands twice"),
        (make_copies(["batch", 2], ["batch", 2]), ["y=x", "out=state"], "every input is a state"),
        (make_hidden(), ["hn=h0"], "every output is a state"),
    ],
)
def test_states_that_do_not_fit_are_refused(
    tmp_path: Path, model: onnx.ModelProto, options: list[str], message: str
) -> None:
    path = saved(model, tmp_path / "copies.onnx")
    states = [part for option in options for part in ("--state", option)]

    def run(*more: str) -> Outcome:
        return package(path, tmp_path / "out", *states, *more)

    check_refused(run, 3, message)


@pytest.mark.parametrize("text", ["hn", "=h0", "hn=", "hn=h0 --state hn=c0"])
def test_a_malformed_state_is_a_usage_error(tmp_path: Path, text: str) -> None:
    path = saved(make_spotter(), tmp_path / "spotter.onnx")
    assert package(path, tmp_path / "out", "--state", *text.split()).code == 2


def test_a_batch_and_states_exclude_each_other(tmp_path: Path) -> None:
    path = saved(make_spotter(), tmp_path / "spotter.onnx")
    outcome = package(path, tmp_path / "out", "--state", "hn=h0", "--batch", 4)
    assert "--batch 4 and --state exclude each other" in " ".join(outcome.stderr.split())


def test_a_state_array_in_samples_is_refused(tmp_path: Path) -> None:
    path = saved(make_spotter(), tmp_path / "spotter.onnx")
    words, _ = draw_words(4, 1)
    data = stored(tmp_path / "c.npz", {"x": words, "h0": np.zeros((4, HIDDEN), np.float32)})
    outcome = package(path, tmp_path / "out", "--state", "hn=h0", "--calibration", data)
    assert "no input takes: 'h0'" in " ".join(outcome.stderr.split())


@pytest.mark.parametrize("is_named", [True, False])
def test_an_axis_of_states_that_is_no_batch_stays(tmp_path: Path, is_named: bool) -> None:
    """Time is in front of the input, so the second axis of the state is not its first."""
    model = make_copies(["layers", 4] if is_named else [2, 4], [2, 4])
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "time" if is_named else "batch"
    path = saved(model, tmp_path / "copies.onnx")
    if is_named:
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "layers"
        path = saved(model, path)
    source = load_model(path, None, {"out": "state"})
    assert source.inputs[1].shape == (("layers", 4) if is_named else (2, 4))
