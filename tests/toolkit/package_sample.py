"""Writes small signed packages of real models for the tests of commands."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, ValueInfoProto, helper
from tests.toolkit.package_run import model_of, tensor

from edgekit_runtime.package.archive import Sign, write_package
from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.package.manifest_entries import Artifact, BackendChoice
from edgekit_toolkit.onnx_graph.specs import tensor_specs
from edgekit_toolkit.packaging.signing_keys import load_signer

WEIGHT = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
GOLDEN_X = np.array([[-1.0, -0.5, 0.0, 0.5]], np.float32)


def make_model(
    nodes: Sequence[NodeProto], inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto]
) -> bytes:
    """A model of these nodes, which may use the constant `w` (`WEIGHT`)."""
    return bytes(model_of(nodes, inputs, outputs, {"w": WEIGHT}, opset=13).SerializeToString())


def write_linear(
    path: Path,
    *,
    batch: int | str = "N",
    total: bool = True,
    golden_y: NDArray[Any] | None = None,
    **rest: Any,
) -> Path:
    """Write a package of y [batch, 2] = x [batch, 4] @ WEIGHT and, if wanted, total [] = the sum of y.

    Args:
        path: of the package.
        batch: of the model.
        total: whether the model has that output.
        golden_y: expected output instead of the right one.
        rest: as for `write_model`.
    """
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    outputs = [tensor("y", [batch, 2])]
    if total:
        nodes.append(helper.make_node("ReduceSum", ["y"], ["total"], keepdims=0))
        outputs.append(tensor("total", []))
    golden_x = np.repeat(GOLDEN_X, batch if isinstance(batch, int) else 1, axis=0)
    model = make_model(nodes, [tensor("x", [batch, 4])], outputs)
    expected = golden_x @ WEIGHT if golden_y is None else golden_y.astype(np.float32)
    return write_model(path, model, golden_x, expected, **{"labels": b"no\nyes\n", **rest})


def write_model(
    path: Path,
    model: bytes,
    golden_x: NDArray[Any],
    golden_y: NDArray[Any],
    *,
    sign: Sign | None = None,
    labels: bytes | None = None,
    **changes: Any,
) -> Path:
    """Write a package of a model with one input; by default signed with the key `default`, which is trusted.

    Args:
        path: of the package.
        model: ONNX.
        golden_x: golden input.
        golden_y: golden value of the first output.
        sign: with another key.
        labels: content of the labels, or None for a package without.
        changes: of fields of the manifest.
    """
    inputs, outputs = tensor_specs(onnx.load_model_from_string(model))
    contents = {"golden/x.bin": golden_x.tobytes(), "golden/y.bin": golden_y.tobytes(), "model.onnx": model}
    if labels is not None:
        contents["labels.txt"] = labels
    roles = {"labels.txt": "labels", "model.onnx": "model"}
    x = GoldenInput(inputs[0].name, golden_x.dtype.name, golden_x.shape, "golden/x.bin")
    y = GoldenOutput(
        name=outputs[0].name,
        dtype=golden_y.dtype.name,
        shape=golden_y.shape,
        path="golden/y.bin",
        atol=1e-5,
        rtol=1e-5,
    )
    fields: dict[str, Any] = {
        "name": "linear",
        "version": "1.0.0",
        "target": "x86-64",
        "inputs": inputs,
        "outputs": outputs,
        "artifacts": tuple(
            Artifact(name, len(content), hashlib.sha256(content).hexdigest(), roles.get(name, "golden"))
            for name, content in sorted(contents.items())
        ),
        "backend": BackendChoice("ort", "model.onnx", {"threads": 1}),
        "golden": Golden((x,), (y,)),
        "labels": None if labels is None else "labels.txt",
    }
    write_package(path, Manifest(**{**fields, **changes}), contents, sign or load_signer())
    return path
