"""Inputs of public models, real ones where they can be had, and weights where a file has none."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekit_toolkit.importers.onnx import load_onnx
from edgekit_toolkit.onnx_graph.specs import tensor_specs
from edgekit_toolkit.samples.generated import Feeds, bind_dims, generate_feeds
from public_models import MissingError, PublicModel
from works import WORKS

CALIBRATION = EVALUATION = 8
FRESH = 4
# Works of works.py that have real samples for a model.
REAL = {
    "resnet8_cifar10_fp32": "resnet8",
    "dscnn_kws_fp32": "dscnn",
    "mobilenetv1_025_vww_fp32": "vww",
    "mobilenet_v1_025_224_fp32": "mobilenet_v1_025",
    "efficientnet_lite0_fp32": "efficientnet_lite0",
    "ppocr_v4_det": "ppocr_det",
    "ppocr_v6_det": "ppocr_det",
}


class Samples(NamedTuple):
    """Disjoint samples of one model, each a feed of the model's own shapes."""

    kind: str
    calibration: list[Feeds]
    evaluation: list[Feeds]
    fresh: list[Feeds]


def read_source(public: PublicModel) -> tuple[onnx.ModelProto, dict[str, int]]:
    """Return a model as imported, with random weights where it has none, and sizes of its free dimensions."""
    source = load_onnx(public.path()).model.proto
    if not public.weights:
        source = with_random_weights(source)
    return source, bind_dims(source, public.dims, public.ranges)


def samples_of(public: PublicModel, source: onnx.ModelProto, dims: Mapping[str, int]) -> Samples:
    """The samples of a model; of real ones the last of its evaluation data are the fresh ones."""
    inputs, _ = tensor_specs(source)
    work = next((work for work in WORKS if work.name == REAL.get(public.name)), None)
    if work is not None:
        try:
            parts = [next(array for name, array in part.items() if name != "y") for part in work.load()]
        except MissingError:
            pass
        else:
            name = inputs[0].name
            known, held_out = ([{name: row[None]} for row in part] for part in parts)
            return Samples(
                "real", known[: 2 * CALIBRATION], held_out[:-FRESH][: 2 * EVALUATION], held_out[-FRESH:]
            )
    counts = (CALIBRATION, EVALUATION, FRESH)
    made = [generate_feeds(inputs, count, seed, dims, public.ranges) for seed, count in enumerate(counts, 1)]
    return Samples("generated", *made)


def with_random_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose constant weights are seeded noise, without the softmax at its end."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    result.ir_version = max(result.ir_version, 4)  # before that, constants had to be inputs as well
    rng = np.random.default_rng(0)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.graph.initializer}
    kept = []
    for node in result.graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
        else:
            value = random_weight(rng, tuple(int(size) for size in stored[node.input[0]]))
            result.graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    if kept[-1].op_type == "Softmax":  # of such weights it is 0 or 1, which hides every difference
        result.graph.output[0].name = kept.pop().input[0]
    del result.graph.node[:]
    result.graph.node.extend(kept)
    return result


def random_weight(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Weights that keep the size of what they are multiplied with; scales, biases and variances around 1."""
    if len(shape) < 2:
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    values: NDArray[Any] = rng.standard_normal(shape, np.float32)
    return values * np.float32(np.sqrt(2 / np.prod(shape[1:])))
