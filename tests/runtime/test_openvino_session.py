"""The OpenVINO backend; what needs OpenVINO itself is skipped where it is missing."""

import contextlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgekit_runtime.engines.openvino import OPENVINO
from edgekit_runtime.errors import BackendError, DataError, RefusedInputError
from edgekit_runtime.sessions.backends import open_model
from edgekit_runtime.system.engines import EngineMissingError, check_backends
from edgekit_runtime.system.install_hint import install_command
from edgekit_toolkit.openings.model_opening import Openings

needs_openvino = pytest.mark.skipif(
    find_spec("openvino") is None, reason="OpenVINO is not installed: pip install openvino"
)


def value(name: str, dtype: int, shape: list[int | str | None] | None) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def make_model(nodes: list[Any], inputs: list[Any], outputs: list[Any], **weights: Any) -> bytes:
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "net", inputs, outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def relu() -> bytes:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Identity", ["r"], ["same"]),
        helper.make_node("Greater", ["x", "r"], ["more"]),
    ]
    outputs = [value("same", 1, None), value("r", 1, None), value("more", TensorProto.BOOL, None)]
    return make_model(nodes, [value("x", 1, ["n", 3, None])], outputs)


def fake_engine(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module `openvino` in front of an installed one, for child processes too."""
    (folder / "openvino.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.delitem(sys.modules, "openvino", raising=False)


@needs_openvino
def test_session_has_the_names_and_sizes_of_the_model_and_runs_any_strides() -> None:
    session = open_model("openvino", relu())
    assert [(spec.name, spec.dtype, spec.shape) for spec in session.inputs] == [
        ("x", "float32", ("x_0", 3, "x_2"))
    ]
    assert [(spec.name, spec.dtype) for spec in session.outputs] == [
        ("same", "float32"),
        ("r", "float32"),
        ("more", "bool"),
    ]
    values = np.arange(-12, 12, dtype=np.float32).reshape(2, 3, 4)[:, :, ::2]
    outputs = session.run({"x": values})
    np.testing.assert_array_equal(outputs["same"], np.maximum(values, 0))
    outputs["same"][:] = 9  # the caller's
    np.testing.assert_array_equal(session.run({"x": values})["r"], np.maximum(values, 0))
    assert session.run({"x": np.ones((0, 3, 4), np.float32)})["r"].shape == (0, 3, 4)


@needs_openvino
def test_wrong_inputs_are_refused_and_the_session_goes_on() -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    inputs = [value("x", 1, ["n"]), value("shape", TensorProto.INT64, [2])]
    session = open_model("openvino", make_model(nodes, inputs, [value("y", 1, None)]))
    x = np.ones(4, np.float32)
    with pytest.raises(DataError):
        session.run({"x": x})
    with pytest.raises(DataError):
        session.run({"x": x.astype(np.float64), "shape": np.array([2, 2])})
    with pytest.raises(RefusedInputError):
        session.run({"x": x, "shape": np.array([3, 2])})
    assert session.run({"x": x, "shape": np.array([2, 2])})["y"].shape == (2, 2)
    session.close()
    session.close()
    with pytest.raises(BackendError, match="closed"):
        session.run({"x": x, "shape": np.array([2, 2])})


@needs_openvino
@pytest.mark.parametrize("content", [b"", b"not a model", relu()[:40]])
def test_file_that_is_no_model_is_refused(content: bytes) -> None:
    with pytest.raises(BackendError, match="OpenVINO refused the model"):
        open_model("openvino", content)


@needs_openvino
def test_unknown_option_is_refused() -> None:
    with pytest.raises(BackendError, match="spinning"):
        open_model("openvino", relu(), {"spinning": True})


@needs_openvino
@pytest.mark.parametrize("isa", ["DEFAULT", "AVX2"])
def test_products_of_7_bit_weights_are_exact_with_and_without_vnni(isa: str) -> None:
    """OpenVINO's kernels take the limit on instructions from the environment, once in a process."""
    code = "from tests.runtime import test_openvino_session as t; t.print_largest_error(63)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) == 0


def print_largest_error(peak: int) -> None:
    """Compare a convolution of the largest codes with its integers."""
    codes = np.full((64, 64, 1, 1), peak, np.int8)
    scales = {"one": np.float32(1), "half": np.float32(0.5), "zero": np.uint8(0), "zero_w": np.int8(0)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "one", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "one", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "half", "zero_w"], ["v"]),
        helper.make_node("Conv", ["d", "v"], ["y"]),
    ]
    weights = {name: np.asarray(array) for name, array in scales.items()}
    model = make_model(
        nodes, [value("x", 1, [1, 64, 8, 8])], [value("y", 1, [1, 64, 8, 8])], w=codes, **weights
    )
    outputs = open_model("openvino", model).run({"x": np.full((1, 64, 8, 8), 255, np.float32)})
    print(np.abs(outputs["y"] - 64 * 255 * peak / 2).max())


@pytest.mark.parametrize(
    "text",
    [
        "raise ImportError('libopenvino.so.2641: cannot open shared object file')",
        "raise AttributeError('module openvino._pyopenvino has no attribute Core')",  # files of two releases
    ],
)
def test_engine_that_is_installed_and_cannot_be_loaded_counts_as_missing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine(tmp_path, text, monkeypatch)
    with pytest.raises(EngineMissingError, match=re.escape(install_command("openvino"))):
        open_model("openvino", relu())


def test_engine_that_ends_its_process_over_a_model_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os\nTensor = None\n\n\ndef Core():\n    os.abort()\n"
    fake_engine(tmp_path, text, monkeypatch)
    with (
        contextlib.closing(Openings()) as openings,
        pytest.raises(BackendError, match="OpenVINO ended the process that opened the model"),
    ):
        openings.check("openvino", relu(), {})


@needs_openvino
def test_bfloat16_is_computed_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgekit_runtime.sessions import openvino

    rng = np.random.default_rng(0)
    shapes = [value("x", 1, [8, 256]), value("y", 1, None)]
    weights = rng.normal(size=(256, 256)).astype(np.float32)
    model = make_model([helper.make_node("MatMul", ["x", "w"], ["y"])], shapes[:1], shapes[1:], w=weights)
    feeds = {"x": rng.normal(size=(8, 256)).astype(np.float32)}

    def error(precision: str) -> float:
        with contextlib.closing(open_model("openvino", model, {"precision": precision})) as session:
            expected = feeds["x"].astype(np.float64) @ weights
            return float(np.abs(session.run(feeds)["y"] - expected).max() / np.ptp(expected))

    assert error("float32") < 1e-5
    assert (1e-4 < error("bfloat16") < 1e-2) == openvino.computes_bfloat16()
    monkeypatch.setattr(openvino, "computes_bfloat16", lambda: False)
    assert error("bfloat16") < 1e-5
    with pytest.raises(BackendError, match="precision"):
        error("float8")


def test_import_leaves_telemetry_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "openvino_telemetry.py").write_text("raise SystemExit('an event was sent')")
    text = "try:\n    import openvino_telemetry\nexcept ImportError:\n    pass\nraise ImportError('no more')"
    fake_engine(tmp_path, text, monkeypatch)
    with pytest.raises(EngineMissingError, match="no more"):
        open_model("openvino", relu())
    assert "openvino_telemetry" not in sys.modules


@pytest.mark.skipif(OPENVINO.installation.is_complete, reason="OpenVINO is installed")
def test_device_without_the_engine_says_what_to_install() -> None:
    with pytest.raises(EngineMissingError, match=r"net 1\.0\.0.*'openvino'") as refusal:
        check_backends(["openvino"], "net 1.0.0")
    assert install_command("openvino") in str(refusal.value)
