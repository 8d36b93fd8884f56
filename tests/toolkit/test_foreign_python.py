"""Models that the user's own Python exports: an environment with stand-ins for TensorFlow and torch."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.toolkit.package_run import edgekit

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.importers.foreign_python import export_by

# A SavedModel that doubles its input; `tf2onnx` finds the export in its folder.
TENSORFLOW = """
from types import SimpleNamespace as Record
import sys
import numpy as np
assert not [path for path in sys.path if path.endswith(("toolkit", "importers"))], sys.path
class Tensor:
    def __init__(self, value): self.value = value
    def numpy(self): return self.value
constant = Tensor
floats = Record(is_floating=True, as_numpy_dtype=np.float32)
spec = Record(shape=Record(as_list=lambda: [None, 4]), dtype=floats)
def double(x): return {"y": Tensor(x.value * np.float32(2))}
double.structured_input_signature = ((), {"x": spec})
saved_model = Record(load=lambda path: Record(signatures={"serving_default": double}))
"""
CONVERT = """
import argparse, shutil
parser = argparse.ArgumentParser()
for option in ("--saved-model", "--signature_def", "--opset", "--output"):
    parser.add_argument(option)
stated = parser.parse_args()
shutil.copy(stated.saved_model + "/export.onnx", stated.output)
"""
TORCH = """
from types import SimpleNamespace as Record
import os
import onnx as formats
assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
export = Record(load=lambda path: Record(call_spec=Record(out_spec=None)))
onnx = Record(export=lambda *_, **__: Record(model_proto=formats.load({path!r})))
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An environment with numpy and onnx, and without edgekit."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    return folder / "bin/python"


def install(python: Path, name: str, source: str) -> None:
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    path = site / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)


def install_tensorflow(python: Path) -> None:
    install(python, "tensorflow", TENSORFLOW)
    install(python, "tf2onnx/__init__", "")
    install(python, "tf2onnx/convert", CONVERT)


def scaled(factor: float, width: int = 4) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", width]) for name in "xy")
    weight = numpy_helper.from_array(np.float32([factor] * width), "factor")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "factor"], ["y"])], "scaled", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def saved_model(tmp_path: Path, exported: onnx.ModelProto) -> Path:
    folder = tmp_path / "doubler"
    folder.mkdir()
    (folder / "saved_model.pb").write_bytes(b"\x08\x01")
    onnx.save(exported, folder / "export.onnx")
    return folder


def test_saved_model_is_exported_by_the_users_tensorflow_and_packaged(tmp_path: Path, python: Path) -> None:
    install_tensorflow(python)
    model, out = saved_model(tmp_path, scaled(2.0)), tmp_path / "out"
    outcome = edgekit("package", model, "--python", python, "-t", "x86-64", "--backend", "ort", "-o", out)
    assert outcome.code == 0, outcome.stderr
    assert (out / "doubler.onnx").is_file()
    assert (out / "doubler-1.0.0-x86-64.edgepkg").is_file()


@pytest.mark.parametrize("exported", [scaled(2.01), scaled(2.0, 5)])
def test_export_that_computes_something_else_is_refused(
    tmp_path: Path, python: Path, exported: onnx.ModelProto
) -> None:
    install_tensorflow(python)
    with pytest.raises(ModelError, match=r"from TensorFlow's|does not run on TensorFlow's inputs"):
        export_by(python, saved_model(tmp_path, exported), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_environment_without_the_library_is_named(tmp_path: Path, python: Path) -> None:
    with pytest.raises(ModelError, match=r"has no TensorFlow .*No module named 'tensorflow'"):
        export_by(python, saved_model(tmp_path, scaled(2.0)), tmp_path / "out")
    program = tmp_path / "net.pt2"
    program.write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="pip install torch onnxscript there"):
        export_by(python, program, tmp_path / "out")


def test_library_that_refuses_the_model_says_why(tmp_path: Path, python: Path) -> None:
    install(python, "tensorflow", "saved_model = None")
    with pytest.raises(ModelError, match="cannot export it: AttributeError: 'NoneType'"):
        export_by(python, saved_model(tmp_path, scaled(2.0)), tmp_path / "out")


def test_pt2_is_exported_by_the_torch_that_wrote_it(tmp_path: Path, python: Path) -> None:
    onnx.save(scaled(3.0), tmp_path / "made.onnx")
    install(python, "torch", TORCH.format(path=str(tmp_path / "made.onnx")))
    install(python, "onnxscript", "")
    program = tmp_path / "net.pt2"
    program.write_bytes(b"PK\x03\x04")
    path = export_by(python, program, tmp_path / "out")
    assert path == tmp_path / "out/net.onnx"
    assert onnx.load(path).graph.node[0].op_type == "Mul"


def test_python_for_a_model_that_needs_none_is_refused(tmp_path: Path, python: Path) -> None:
    onnx.save(scaled(1.0), tmp_path / "plain.onnx")
    with pytest.raises(ModelError, match="leave it out"):
        export_by(python, tmp_path / "plain.onnx", tmp_path / "out")
