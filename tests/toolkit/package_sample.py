"""Writes small signed packages of real models for the tests of commands."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from edgekit_runtime.archive import Sign, write_package
from edgekit_runtime.entries import Artifact, BackendChoice
from edgekit_runtime.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.manifest import Manifest
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.sign import load_signer

WEIGHT = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
GOLDEN_X = np.array([[-1.0, -0.5, 0.0, 0.5]], np.float32)
LABELS = b"no\nyes\n"


def linear_model(batch: int | str = "N") -> bytes:
    """y [batch, 2] = x [batch, 4] @ WEIGHT, and total [] = the sum of y."""
    info, float32 = helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("ReduceSum", ["y"], ["total"], keepdims=0),
        ],
        "linear",
        [info("x", float32, [batch, 4])],
        [info("y", float32, [batch, 2]), info("total", float32, [])],
        [onnx.numpy_helper.from_array(WEIGHT, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return bytes(model.SerializeToString())


def write_linear(
    path: Path,
    *,
    sign: Sign | None = None,
    batch: int | str = "N",
    golden_y: NDArray[Any] | None = None,
    labels: bytes | None = LABELS,
    **changes: Any,
) -> Path:
    """Write a package of `linear_model`; by default signed with the key `default`, which is then trusted.

    Args:
        path: of the package.
        sign: with another key.
        batch: of the model.
        golden_y: expected output [1 or batch, 2] in the place of the right one.
        labels: content of the labels, or None for a package without.
        changes: of fields of the manifest.
    """
    golden_x = np.repeat(GOLDEN_X, batch if isinstance(batch, int) else 1, axis=0)
    expected = golden_x @ WEIGHT if golden_y is None else golden_y.astype(np.float32)
    artifacts = {
        "golden/x.bin": (golden_x.tobytes(), "golden"),
        "golden/y.bin": (expected.tobytes(), "golden"),
        "model.onnx": (linear_model(batch), "model"),
    }
    if labels is not None:
        artifacts["labels.txt"] = (labels, "labels")
    golden = Golden(
        (GoldenInput("x", "float32", golden_x.shape, "golden/x.bin"),),
        (GoldenOutput("y", "float32", expected.shape, "golden/y.bin", 1e-5, 1e-5),),
    )
    fields: dict[str, Any] = {
        "name": "linear",
        "version": "1.0.0",
        "target": "x86-64",
        "inputs": (TensorSpec("x", "float32", (batch, 4)),),
        "outputs": (TensorSpec("y", "float32", (batch, 2)), TensorSpec("total", "float32", ())),
        "artifacts": tuple(
            Artifact(name, len(content), hashlib.sha256(content).hexdigest(), role)
            for name, (content, role) in sorted(artifacts.items())
        ),
        "backend": BackendChoice("ort", "model.onnx", {"threads": 1}),
        "golden": golden,
        "labels": None if labels is None else "labels.txt",
    }
    manifest = Manifest(**{**fields, **changes})
    contents = {name: content for name, (content, _) in artifacts.items()}
    write_package(path, manifest, contents, sign or load_signer())
    return path
