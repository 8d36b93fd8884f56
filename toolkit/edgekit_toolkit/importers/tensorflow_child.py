"""Exports a TensorFlow SavedModel or Keras file. `foreign_python` runs this file in the user's Python.

    ENV/bin/python tensorflow_child.py MODEL FOLDER

It writes `model.onnx` if tf2onnx is installed there, else `model.tflite`. It also writes `check.npz`, with
inputs and the outputs that TensorFlow computes from them. It does not import edgekit. The last line of the
standard error states the reason of a failure.
"""

import os
import subprocess
import sys
from typing import Any

MISSING_LIBRARY = 3  # exit code where TensorFlow cannot be imported
_FREE_SIZE = 64  # for sizes of images and sequences that the signature leaves open
_OPSET = "17"


def main(model: str, folder: str) -> int:
    """Export the folder of a SavedModel or a Keras file to `folder`, and write `check.npz`.

    Returns:
        The exit code, which is 0 on success, 1 if TensorFlow fails, or `MISSING_LIBRARY`.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    try:
        import numpy as np
        import tensorflow as tf
    except ImportError as error:
        print(error, file=sys.stderr)
        return MISSING_LIBRARY
    try:
        saved = model
        if not os.path.isdir(model):  # noqa: PTH112  # as the other Python's libraries take paths
            saved = f"{folder}/saved_model"
            tf.keras.models.load_model(model, compile=False).export(saved)
        loaded = tf.saved_model.load(saved)
        name, function = _find_signature(loaded)
        inputs = _make_inputs(function, np)
        outputs = function(**{key: tf.constant(value) for key, value in inputs.items()})
        arrays = {f"in/{key}": value for key, value in inputs.items()}
        arrays |= {f"out/{key}": value.numpy() for key, value in outputs.items()}
        np.savez(f"{folder}/check.npz", **arrays)
        _export(saved, name, folder, tf)
    except Exception as error:  # whatever the libraries raise is reported to the parent
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", file=sys.stderr)
        return 1
    return 0


def _find_signature(loaded: Any) -> tuple[str, Any]:
    signatures = loaded.signatures
    for name in ("serving_default", *signatures):
        if name in signatures:
            return name, signatures[name]
    raise ValueError("the SavedModel has no signature; save it with signatures=…")


def _make_inputs(function: Any, np: Any) -> dict[str, Any]:
    values = np.random.default_rng(0)
    inputs = {}
    for name, spec in function.structured_input_signature[1].items():
        sizes = [size or (1 if axis == 0 else _FREE_SIZE) for axis, size in enumerate(spec.shape.as_list())]
        drawn = values.random(sizes) if spec.dtype.is_floating else np.zeros(sizes)
        inputs[name] = drawn.astype(spec.dtype.as_numpy_dtype)
    return inputs


def _export(saved: str, signature: str, folder: str, tf: Any) -> None:
    try:
        import tf2onnx  # noqa: F401
    except ImportError:
        converter = tf.lite.TFLiteConverter.from_saved_model(saved, signature_keys=[signature])
        with open(f"{folder}/model.tflite", "wb") as file:  # noqa: PTH123
            file.write(converter.convert())
        return
    argv = [sys.executable, "-m", "tf2onnx.convert", "--saved-model", saved, "--signature_def", signature]
    argv += ["--opset", _OPSET, "--output", f"{folder}/model.onnx"]
    result = subprocess.run(argv, check=False, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"tf2onnx: {result.stderr.strip().splitlines()[-1:]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
