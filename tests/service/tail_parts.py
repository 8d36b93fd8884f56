"""Packages with tails, as a device splits them."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from tests.runtime.conftest import PackageMaker

from edgekit_runtime.package.archive import write_package
from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest_entries import Artifact, BackendChoice
from edgekit_runtime.package.submodels import Submodel, served_name
from edgekit_runtime.tensors import TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]
FEATURES = np.array([[0.5, -1.0, 2.0]], np.float32)


@dataclasses.dataclass
class Part:
    """A sketch of a submodel.

    Attributes:
        name: of the submodel.
        model: content of its ONNX file.
        inputs, outputs: golden tensors.
        shapes: tensor -> shape in the manifest, else [N, ...].
        options: of the backend, beside the number of threads.
    """

    name: str
    model: bytes
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    shapes: Mapping[str, tuple[int | str, ...]] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def scale_part(name: str, factor: float) -> Part:
    """z[N, 3] = features[N, 3] * factor."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Mul", ["features", "factor"], ["z"])],
        "scale",
        [helper.make_tensor_value_info("features", kind, ["N", 3])],
        [helper.make_tensor_value_info("z", kind, ["N", 3])],
        [onnx.numpy_helper.from_array(np.float32(factor), "factor")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    product = (FEATURES * np.float32(factor)).astype(np.float32)
    return Part(name, model.SerializeToString(), {"features": FEATURES}, {"z": product})


def write_split(maker: PackageMaker, path: Path, *parts: Part, version: str = "1.0.0") -> list[str]:
    """Write `linear` with submodels; return the names that they are served under."""
    contents, roles = dict(maker.artifacts), dict(maker.roles)
    submodels = []
    for part in parts:
        at = f"offload/{part.name}"
        contents[f"{at}.onnx"], roles[f"{at}.onnx"] = part.model, "submodel"
        for name, array in (*part.inputs.items(), *part.outputs.items()):
            contents[f"{at}/{name}.bin"], roles[f"{at}/{name}.bin"] = array.tobytes(), "golden"

        def describe(tensors: Mapping[str, Array], part: Part = part) -> tuple[TensorSpec, ...]:
            return tuple(
                TensorSpec(name, array.dtype.name, part.shapes.get(name, ("N", *array.shape[1:])))
                for name, array in tensors.items()
            )

        golden = Golden(
            tuple(
                GoldenInput(name, array.dtype.name, array.shape, f"{at}/{name}.bin")
                for name, array in part.inputs.items()
            ),
            tuple(
                GoldenOutput(
                    name=name,
                    dtype=array.dtype.name,
                    shape=array.shape,
                    path=f"{at}/{name}.bin",
                    atol=1e-5,
                    rtol=1e-5,
                )
                for name, array in part.outputs.items()
            ),
        )
        choice = BackendChoice("ort", f"{at}.onnx", {"threads": 1, **part.options})
        submodels.append(Submodel(part.name, describe(part.inputs), describe(part.outputs), choice, golden))
    artifacts = {
        name: Artifact(name, len(data), hashlib.sha256(data).hexdigest(), roles[name])
        for name, data in sorted(contents.items())
    }
    manifest = dataclasses.replace(
        maker.manifest(),
        version=version,
        submodels=tuple(submodels),
        artifacts=tuple(artifacts.values()),
    )
    write_package(path, manifest, contents, maker.signer)
    return [served_name(manifest.name, one, artifacts) for one in submodels]
