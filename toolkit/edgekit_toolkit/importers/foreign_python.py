"""Exports models with TensorFlow or torch in the user's own Python environment.

`--python ENV/bin/python` is the interpreter of an environment that has TensorFlow for a SavedModel or a Keras
file, or torch for a `.pt2`. The environment of edgekit needs neither. The exported file is stored, and
packaged like any other file:

    edgekit package saved_model/ --python ~/train/env/bin/python --target rpi5

A model exported by TensorFlow is run on the same inputs as the original, and refused if the outputs differ.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from edgekit_runtime.errors import EdgekitError, ModelError
from edgekit_runtime.system.child_process import describe_end, run_program
from edgekit_runtime.tensors import Array
from edgekit_toolkit.importers import pt2_child, tensorflow_child
from edgekit_toolkit.importers.pt2 import explain_failure, is_pt2
from edgekit_toolkit.importers.source import load_model
from edgekit_toolkit.models.model import Model

_TIME_LIMIT_S: Final = 900.0
_KERAS_ENDINGS: Final = (".keras", ".h5", ".hdf5")
# A share of an output's range. Sums of float32 in another order differ far less, another operator far more.
_TOLERANCE: Final = 1e-3
# Nothing is imported from the script's folder, because it has modules with the names of libraries.
_RUN: Final = (
    "import sys, runpy; sys.path.pop(0); sys.argv = sys.argv[1:];"
    " runpy.run_path(sys.argv[0], run_name='__main__')"
)


def export_by(python: Path, model: Path, folder: Path) -> Path:
    """Export a model with another Python. Return the path of the ONNX or `.tflite` file in `folder`.

    Args:
        python: The interpreter of an environment with TensorFlow or torch.
        model: The folder of a SavedModel, a Keras file or a `.pt2`. It must be trusted, because its code
            runs.
        folder: The folder for the result, which is created.

    Raises:
        ModelError: The format is not supported, the library is missing, refuses the model or takes too long,
            or the exported model computes other outputs.
    """
    if is_pt2(model):
        return _export_pt2(python, model, folder)
    if (model / "saved_model.pb").is_file() or model.suffix in _KERAS_ENDINGS:
        return _export_tensorflow(python, model, folder)
    raise ModelError(
        f"{model}: --python is for a SavedModel's folder, a Keras file ({', '.join(_KERAS_ENDINGS)}) or"
        " a .pt2; leave it out"
    )


def _export_pt2(python: Path, model: Path, folder: Path) -> Path:
    with tempfile.TemporaryDirectory(prefix="edgekit-pt2-") as name:
        result = Path(name, "model.onnx")
        code, last_line = _run(python, Path(pt2_child.__file__), model, result)
        if code != 0 or not result.is_file():
            raise explain_failure(model, code, last_line, python)
        return _keep(result, folder, model)


def _export_tensorflow(python: Path, model: Path, folder: Path) -> Path:
    with tempfile.TemporaryDirectory(prefix="edgekit-tensorflow-") as name:
        code, last_line = _run(python, Path(tensorflow_child.__file__), model, Path(name))
        if code == tensorflow_child.MISSING_LIBRARY:
            raise ModelError(
                f"{model}: {python} has no TensorFlow ({last_line}); name an environment that has it"
            )
        if code != 0:
            reason = "it took too long" if code is None else last_line or describe_end(code)
            raise ModelError(f"{model}: TensorFlow of {python} cannot export it: {reason}")
        result = next(path for path in sorted(Path(name).glob("model.*")))
        _check(model, load_model(result).model, Path(name, "check.npz"))
        return _keep(result, folder, model)


def _run(python: Path, script: Path, model: Path, result: Path) -> tuple[int | None, str]:
    """Run a script of ours with another Python, without our own import path."""
    argv = [str(python), "-E", "-c", _RUN, str(script), str(model.absolute()), str(result)]
    try:
        ended = run_program(argv, (), _TIME_LIMIT_S, 0)
    except OSError as cause:
        raise ModelError(f"--python {python}: cannot be started: {cause.strerror}") from cause
    return ended.exit_code, ended.last_line


def _keep(result: Path, folder: Path, model: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(result, folder / f"{model.resolve().stem}{result.suffix}"))


def _check(path: Path, model: Model, stored: Path) -> None:
    """Check that a model computes what TensorFlow did from the same inputs.

    Converters rename tensors: an input is known by its name within the new one, else by its shape; an output
    must be near one of TensorFlow's.
    """
    with np.load(stored) as arrays:
        values = {name: arrays[name] for name in arrays.files}
    inputs = {name[3:]: value for name, value in values.items() if name.startswith("in/")}
    expected = {name[4:]: value for name, value in values.items() if name.startswith("out/")}
    session = model.open_session(threads=1)
    try:
        outputs = session.run({spec.name: _match(spec, inputs) for spec in session.inputs})
    except (EdgekitError, StopIteration) as error:
        raise ModelError(f"{path}: exported, it does not run on TensorFlow's inputs: {error}") from error
    finally:
        session.close()
    for name, value in expected.items():
        difference = min((_difference(value, output) for output in outputs.values()), default=np.inf)
        if not difference <= _TOLERANCE:
            raise ModelError(
                f"{path}: exported, its output '{name}' is {difference:.2g} of its range from TensorFlow's,"
                f" at most {_TOLERANCE:g} is allowed; export it with another release of tf2onnx or TensorFlow"
            )


def _match(spec: Any, inputs: Mapping[str, Array]) -> Array:
    named = [value for name, value in inputs.items() if name in spec.name]
    alike = [value for value in inputs.values() if value.ndim == len(spec.shape)]
    return next(iter(named or alike))


def _difference(expected: Array, output: Array) -> float:
    """Return the largest difference as a share of the expected range; infinite for another shape."""
    if expected.shape != output.shape or not np.all(np.isfinite(output) == np.isfinite(expected)):
        return float("inf")
    wide = expected.astype(np.float64)
    return float(np.max(np.abs(wide - output), initial=0.0) / (np.max(np.abs(wide), initial=0.0) or 1.0))
