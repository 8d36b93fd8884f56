"""The committed tiny models are the ones their records describe, and are as good as they say."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny"
RECORDS: dict[str, dict[str, Any]] = json.loads((FOLDER / "models.json").read_text(encoding="utf-8"))
MAX_MODEL_BYTES = 150_000
# float32 sums run in another order on another CPU, so one sample with two nearly equal logits may
# change sides; a second one would mean another model.
CORRECT_TOLERANCE_SAMPLES = 1

every_model = pytest.mark.parametrize("name", sorted(RECORDS))


def load_arrays(name: str, role: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / RECORDS[name]["files"][role]["path"], allow_pickle=False) as arrays:
        return dict(arrays)


def rows(x: np.ndarray) -> set[bytes]:
    return {row.tobytes() for row in x}


def test_records_name_the_four_models() -> None:
    assert sorted(RECORDS) == ["digits_cnn", "italy_power_mlp", "japanese_vowels_tcn", "mnist5k_dscnn"]


@every_model
@pytest.mark.parametrize("role", ["model", "eval", "calib"])
def test_committed_file_matches_recorded_size_and_digest(name: str, role: str) -> None:
    record = RECORDS[name]["files"][role]
    content = (FOLDER / record["path"]).read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (record["bytes"], record["sha256"])


def test_sha256sums_lists_every_data_file_with_its_digest() -> None:
    listed = dict(
        reversed(line.split("  ", 1))
        for line in (FOLDER / "SHA256SUMS").read_text(encoding="ascii").splitlines()
    )
    committed = [*FOLDER.glob("*.onnx"), *FOLDER.glob("*.npz")]
    assert listed == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in committed}


@every_model
def test_model_is_small_valid_onnx_with_a_dynamic_batch(name: str) -> None:
    record = RECORDS[name]
    content = (FOLDER / record["files"]["model"]["path"]).read_bytes()
    model = onnx.load_from_string(content)
    onnx.checker.check_model(model, full_check=True)
    assert len(content) < MAX_MODEL_BYTES
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 18)]
    for value, spec in ((model.graph.input[0], record["input"]), (model.graph.output[0], record["output"])):
        dims = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        assert (value.name, dims) == (spec["name"], spec["shape"])
        assert dims[0] == "N"


@every_model
def test_model_has_no_batch_normalisation_and_no_trace_of_a_machine(name: str) -> None:
    content = (FOLDER / RECORDS[name]["files"]["model"]["path"]).read_bytes()
    model = onnx.load_from_string(content)
    operators = {node.op_type for node in model.graph.node}
    assert operators <= {"Add", "AveragePool", "Clip", "Conv", "Gemm", "MaxPool", "Relu", "Reshape"}
    assert not re.search(rb"site-packages|\.py\b", content)


@every_model
def test_onnxruntime_reaches_the_recorded_accuracy(name: str) -> None:
    record, arrays = RECORDS[name], load_arrays(name, "eval")
    session = onnxruntime.InferenceSession(
        str(FOLDER / record["files"]["model"]["path"]), providers=["CPUExecutionProvider"]
    )
    x, y = arrays[record["input"]["name"]], arrays["y"]
    (logits,) = session.run(None, {record["input"]["name"]: x})
    correct = int((logits.argmax(axis=1) == y).sum())
    assert len(y) == record["eval"]["samples"]
    assert abs(correct - record["eval"]["correct"]) <= CORRECT_TOLERANCE_SAMPLES


@every_model
def test_data_has_the_input_type_and_labels_within_the_classes(name: str) -> None:
    record = RECORDS[name]
    spec = record["input"]
    held_out, calibration = load_arrays(name, "eval"), load_arrays(name, "calib")
    assert (set(held_out), set(calibration)) == ({spec["name"], "y"}, {spec["name"]})
    for x in (held_out[spec["name"]], calibration[spec["name"]]):
        assert (x.dtype, list(x.shape[1:])) == (np.dtype(spec["dtype"]), spec["shape"][1:])
        assert np.isfinite(x).all()
    assert held_out["y"].dtype == np.int64
    assert set(held_out["y"]) == set(range(len(record["classes"])))


@every_model
def test_no_calibration_sample_is_held_out(name: str) -> None:
    key = RECORDS[name]["input"]["name"]
    held_out, calibration = rows(load_arrays(name, "eval")[key]), rows(load_arrays(name, "calib")[key])
    assert len(calibration) == RECORDS[name]["calib"]["samples"]
    assert not held_out & calibration


@every_model
def test_readme_states_the_recorded_figures(name: str) -> None:
    record = RECORDS[name]
    model = record["files"]["model"]
    lines = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"| `{name}` |") and model["sha256"] in line)
    correct, samples = record["eval"]["correct"], record["eval"]["samples"]
    assert f"{100 * correct / samples:.2f} % ({correct}/{samples})" in line
    assert f"| {record['parameters']:,} | {model['bytes']:,} |" in line
