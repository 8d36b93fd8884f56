"""The packages of the fleet demo: a small classifier in four versions, one of which is bad.

Everything is generated from a seed, so nothing is downloaded. The inputs are random points around the centres
of the classes, and least squares determine the weights of the last layer. The bad version has strong noise on
these weights. It passes its self-test but gives wrong answers, like a badly trained model.
"""

from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgekit_fleet.demo.director import MODEL, TARGET, DemoSetup, DemoVersion
from edgekit_toolkit.packaging.plain_package import write_plain_package
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer

_INPUT: Final = "features"
_OUTPUT: Final = "scores"
_FEATURES: Final = 64
_HIDDEN: Final = 256
_CLASSES: Final = 10
_SPREAD: Final = 2.0  # spread of a class around its centre. The centres have a spread of 1
_POINTS: Final = 4000
_TESTED: Final = 500
_OPSET: Final = 17
_SIGNER: Final = "demo"
# The noise on the last weights of each version, relative to their spread.
_NOISES: Final = {"1.0.0": 0.0, "1.1.0": 0.02, "1.2.0": 1.5, "1.3.0": 0.02}


def make_setup(folder: Path) -> DemoSetup:
    """Write the key, packages and inputs of the demo to a folder, and return them.

    Raises:
        OutputError: The folder cannot be written.
    """
    home = folder / "home"
    keys, calls = home / "keys", folder / "calls.npz"
    generate_key(_SIGNER, keys)
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(_CLASSES, _FEATURES))
    classes = rng.integers(_CLASSES, size=_POINTS + _TESTED)
    points = (centres[classes] + rng.normal(0, _SPREAD, (len(classes), _FEATURES))).astype(np.float32)
    tested, right = points[_POINTS:], classes[_POINTS:]
    np.savez(calls, features=tested, classes=right)
    first = rng.normal(0, _FEATURES**-0.5, (_FEATURES, _HIDDEN)).astype(np.float32)
    hidden = np.maximum(points[:_POINTS] @ first, 0)
    last = np.linalg.lstsq(hidden, np.eye(_CLASSES)[classes[:_POINTS]], rcond=None)[0]
    signer = load_signer(_SIGNER, keys)
    versions, answers = [], []
    for version, noise in _NOISES.items():
        weights = last + rng.normal(0, noise * last.std(), last.shape)
        content = _build(first, weights.astype(np.float32))
        model = folder / f"{MODEL}-{version}.onnx"
        model.write_bytes(content)
        path = write_plain_package(
            model, name=MODEL, version=version, target=TARGET, folder=folder, sign=signer
        )
        answers.append(_run(content, tested))
        accuracy, agreement = (float((answers[-1] == reference).mean()) for reference in (right, answers[0]))
        versions.append(DemoVersion(version=version, path=path, accuracy=accuracy, agreement=agreement))
    names = ("first", "good", "bad", "last")
    return DemoSetup(folder=folder, home=home, calls=calls, **dict(zip(names, versions, strict=True)))


def _build(first: NDArray[np.float32], last: NDArray[np.float32]) -> bytes:
    nodes = [
        helper.make_node("MatMul", [_INPUT, "first"], ["mixed"]),
        helper.make_node("Relu", ["mixed"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "last"], [_OUTPUT]),
    ]
    graph = helper.make_graph(
        nodes,
        MODEL,
        [helper.make_tensor_value_info(_INPUT, TensorProto.FLOAT, ["N", _FEATURES])],
        [helper.make_tensor_value_info(_OUTPUT, TensorProto.FLOAT, ["N", _CLASSES])],
        [numpy_helper.from_array(first, "first"), numpy_helper.from_array(last, "last")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def _run(content: bytes, points: NDArray[np.float32]) -> NDArray[np.int64]:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    scores: NDArray[np.float32] = session.run([_OUTPUT], {_INPUT: points})[0]
    best: NDArray[np.int64] = scores.argmax(axis=1)
    return best
