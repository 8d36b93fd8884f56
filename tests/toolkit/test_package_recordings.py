"""Recordings for models with states: cut into steps, judged by events or by a label of the whole."""

import csv
import json
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper
from tests.toolkit.cases import cases
from tests.toolkit.package_run import edgekit, model_of, package, read_only, saved, tensor

from edgekit_runtime.errors import DataError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.evaluation.metrics import METRICS, SetMetric
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.samples.source import open_data
from edgekit_toolkit.samples.truth import TrueSteps

RATE, WINDOW, HOP = 8000, 160, 128
SOUND = {"type": "audio", "sample_rate": RATE, "samples": WINDOW, "hop": HOP}
STEPS = [TensorSpec("x", "float32", ("N", WINDOW))]
LOOSE = ("--budget", "drop=50%,size=10MB", "--state", "hn=h0", "--backend", "ort")


def make_detector() -> onnx.ModelProto:
    """Return a detector of loud sound: score, hn [batch, 1] of x [batch, 160], h0 [batch, 1]."""
    weights = {
        "share": np.float32(0.3),
        "rest": np.float32(0.7),
        "mean": np.full((WINDOW, 1), 1 / WINDOW, np.float32),
        "gain": np.float32(100),
        "offset": np.float32(-4),
    }
    make = helper.make_node
    nodes = [
        make("Mul", ["x", "x"], ["power"]),
        make("MatMul", ["power", "mean"], ["energy"]),
        make("Mul", ["energy", "share"], ["new"]),
        make("Mul", ["h0", "rest"], ["old"]),
        make("Add", ["new", "old"], ["hn"]),
        make("Mul", ["hn", "gain"], ["scaled"]),
        make("Add", ["scaled", "offset"], ["logit"]),
        make("Sigmoid", ["logit"], ["score"]),
    ]
    inputs = [tensor("x", ["batch", WINDOW]), tensor("h0", ["batch", 1])]
    outputs = [tensor("score", ["batch", 1]), tensor("hn", ["batch", 1])]
    return model_of(nodes, inputs, outputs, weights)


def write_wav(path: Path, amplitudes: NDArray[np.float64]) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((amplitudes * 32767).astype("<i2").tobytes())


def draw_sound(seed: int, *, is_loud: bool = True) -> tuple[NDArray[np.float64], float, float]:
    """Return half a second of noise, and where it is loud, in seconds."""
    draw = np.random.default_rng(seed)
    amplitudes = draw.uniform(-0.05, 0.05, RATE // 2)
    begin = int(draw.integers(500, 1500))
    if is_loud:
        amplitudes[begin : begin + 1600] *= 18
    return amplitudes, begin / RATE, (begin + 1600) / RATE


def write_events(folder: Path, seeds: Sequence[int]) -> Path:
    """Write recordings with a list of their loud parts; the last one is quiet."""
    rows: list[tuple[object, ...]] = [("file_name", "begin_s", "end_s", "label")]
    for seed in seeds:
        amplitudes, begin_s, end_s = draw_sound(seed, is_loud=seed != seeds[-1])
        write_wav(folder / f"{seed}.wav", amplitudes)
        rows.append(
            (f"{seed}.wav", begin_s, end_s, "loud") if seed != seeds[-1] else (f"{seed}.wav", "", "", "")
        )
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder


def test_a_recording_is_cut_into_steps_with_what_sounded_before(tmp_path: Path) -> None:
    amplitudes = np.arange(300) / 512
    write_wav(tmp_path / "a.wav", amplitudes)
    ((feeds, _),) = open_data(tmp_path, STEPS, decoding=Decoding(SOUND, in_steps=True)).stream(1)
    padded = np.concatenate([np.zeros(WINDOW - HOP), amplitudes, np.zeros(3 * HOP - 300)])
    expected = [padded[start : start + WINDOW] for start in (0, HOP, 2 * HOP)]
    np.testing.assert_allclose(feeds["x"], expected, atol=1e-4)


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detector")
    saved(make_detector(), folder / "detector.onnx")
    (folder / "sound.json").write_text(json.dumps(SOUND))
    write_events(folder / "events", range(30))
    data = ("--eval", folder / "events", "--preprocessing", folder / "sound.json")
    outcome = package(folder / "detector.onnx", folder / "out", *LOOSE, *data)
    assert outcome.code == 0, outcome.stderr
    return folder


def test_events_judge_the_steps_of_recordings(detector: Path) -> None:
    (path,) = (detector / "out").glob("*.report.json")
    report = json.loads(path.read_text())
    assert report["data"]["evaluation"]["metric"] == "auc_steps"
    with read_only(detector / "out") as opened:
        assert opened.manifest.task is not None
        assert opened.manifest.task.name == "sound_events"
        figures = opened.manifest.figures["score"]
    assert 0.8 < figures["source_value"] < 1  # type: ignore[index, call-overload, operator]  # of a manifest


def test_run_gives_the_scores_of_all_steps_of_a_recording(detector: Path) -> None:
    (path,) = (detector / "out").glob("*.edgepkg")
    outcome = edgekit("run", path, "--input", detector / "events" / "0.wav", "--json")
    assert outcome.code == 0, outcome.stderr
    assert [output["shape"] for output in outcome.json["outputs"]] == [[1, -(-RATE // 2 // HOP), 1]]


def test_a_label_of_a_recording_judges_its_largest_scores(detector: Path, tmp_path: Path) -> None:
    """Sound that ends before the recording does is forgotten at the last step."""
    for seed in range(24):
        is_loud = seed % 2 == 1
        folder = tmp_path / "clips" / ("1_loud" if is_loud else "0_quiet")
        write_wav(folder / f"{seed}.wav", draw_sound(seed, is_loud=is_loud)[0])
    labels = tmp_path / "labels.txt"
    labels.write_text("0_quiet\n1_loud\n")
    data = ("--eval", tmp_path / "clips", "--preprocessing", detector / "sound.json", "--labels", labels)
    outcome = package(
        detector / "detector.onnx", tmp_path / "out", *LOOSE, *data, "--metric", "auc", "--json"
    )
    assert outcome.code == 0, outcome.stderr
    assert outcome.json["candidates"][0]["figures"]["score"]["value"] == 1


@pytest.mark.parametrize(
    ("fields", "in_steps", "message"),
    [
        (
            {"samples": WINDOW, "hop": WINDOW + 1},
            True,
            "hop is 161, expected a whole number from 1 to samples, 160",
        ),
        ({"hop": HOP}, True, "hop is 128, but samples, the length of a step, is missing"),
        ({}, True, "state 'samples', the length of a step"),
        ({"samples": WINDOW}, False, "times of events, which suit a model with states"),
    ],
)
def test_recordings_that_cannot_be_cut_are_refused(
    tmp_path: Path, fields: dict[str, int], in_steps: bool, message: str
) -> None:
    rules = {"type": "audio", "sample_rate": RATE, **fields}
    with pytest.raises(DataError, match=message):
        list(
            open_data(
                write_events(tmp_path, [1, 2]), STEPS, decoding=Decoding(rules, in_steps=in_steps)
            ).stream(1)
        )


@cases(
    ("row", "message"),
    [
        ("b.wav,0,1,loud", "names 'b.wav', which is no recording here"),
        ("1.wav,1,0.5,loud", "expected 'file_name', 'begin_s' and 'end_s' in seconds"),
        ("1.wav,0,nan,loud", "expected 'file_name'"),
        ("1.wav,0,1,", "expected 'file_name'"),
        ("1.wav,7,8,loud", "1.wav: ends after 0.5.* s, and an event of 'loud' begins at 7 s"),
        ("1.wav,0,1,bell", "class 'bell' is none of the labels .loud."),
    ],
)
def test_events_that_cannot_be_used_are_refused(tmp_path: Path, row: str, message: str) -> None:
    (write_events(tmp_path, [1, 2]) / "labels.csv").write_text(f"file_name,begin_s,end_s,label\n{row}\n")
    with pytest.raises(DataError, match=message):
        list(open_data(tmp_path, STEPS, decoding=Decoding(SOUND, ("loud",), in_steps=True)).stream(1))


def test_model_that_leaves_out_steps_is_refused_by_their_metric() -> None:
    metric = METRICS["auc_steps"]
    assert isinstance(metric, SetMetric)
    with pytest.raises(DataError, match="8 rows of scores for 10 steps"):
        metric.reduce({"y": np.zeros((8, 3))}, TrueSteps(np.zeros((10, 3), np.bool_)))
