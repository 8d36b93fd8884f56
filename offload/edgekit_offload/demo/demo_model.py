"""Generates the model of the demo and its images from a seed, without downloads or training.

The model is a convolutional network with 4 billion operations. After a quarter of the operations, there is a
bottleneck, whose tensor has 3.2 kB as 8-bit integers. A JPEG image has 40 kB. The weights are random, so the
classes have no meaning. An answer is correct if the whole model predicts the same class.
"""

from typing import Final

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

SIDE: Final = 320
CLASSES: Final = 10
INPUT: Final = "image"
OUTPUT: Final = "scores"
DESCRIPTION: Final = "a network with random weights, made from a seed; images of 320 x 320 made from a seed"
# Output channels and stride of each convolution.
_LAYERS: Final = (
    (24, 2),
    (48, 2),
    (48, 1),
    (96, 2),
    (96, 1),
    (8, 2),
    (256, 1),
    (256, 1),
    (256, 1),
    (256, 1),
    (256, 1),
    (256, 1),
    (256, 1),
    (256, 1),
)
_KERNEL: Final = 3
_BIAS: Final = "bias"
_OPSET: Final = 17
_NOISE: Final = 6  # added or subtracted, at most, of 255
_OCTAVES: Final = (4, 8, 16, 32, 64, 128)


def make_model(images: NDArray[np.uint8], seed: int = 0) -> bytes:
    """Return the ONNX model, from uint8 [1, 320, 320, 3] to float32 [1, 10].

    The biases are chosen so that each class has a mean score of 0 over `images`. Thus, the answers include
    several classes.
    """
    model = _build(seed)
    means = run_model(model.SerializeToString(), images).mean(axis=0)
    (bias,) = (weights for weights in model.graph.initializer if weights.name == _BIAS)
    bias.CopyFrom(numpy_helper.from_array(-means, _BIAS))
    return bytes(model.SerializeToString())


def run_model(model: bytes, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the scores float32 [images, 10] of images uint8 [images, 320, 320, 3]."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run([OUTPUT], {INPUT: image[None]})[0] for image in images])


def _build(seed: int) -> onnx.ModelProto:
    """Return the model with a bias of 0."""
    rng = np.random.default_rng(seed)
    weights: list[TensorProto] = []

    def constant(name: str, values: NDArray[np.generic]) -> str:
        weights.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    nodes = [
        helper.make_node("Cast", [INPUT], ["pixels"], "to_float", to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["pixels"], ["planes"], "to_planes", perm=[0, 3, 1, 2]),
        helper.make_node(
            "Mul", ["planes", constant("scale", np.float32(1 / 128).reshape(1))], ["scaled"], "to_unit"
        ),
        helper.make_node(
            "Sub", ["scaled", constant("middle", np.float32(1.0).reshape(1))], ["x0"], "to_zero_mean"
        ),
    ]
    channels = 3
    for number, (filters, stride) in enumerate(_LAYERS):
        spread = np.sqrt(2 / (channels * _KERNEL**2))
        kernel = rng.normal(0, spread, (filters, channels, _KERNEL, _KERNEL)).astype(np.float32)
        kernel -= kernel.mean(axis=(1, 2, 3), keepdims=True) / 2
        inputs = [f"x{number}", constant(f"w{number}", kernel)]
        nodes.append(
            helper.make_node(
                "Conv", inputs, [f"c{number}"], f"conv{number}", pads=[1] * 4, strides=[stride] * 2
            )
        )
        nodes.append(helper.make_node("Relu", [f"c{number}"], [f"x{number + 1}"], f"relu{number}"))
        channels = filters
    last = f"x{len(_LAYERS)}"
    head = rng.normal(0, 1, (channels, CLASSES)).astype(np.float32)
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["pooled"], "pool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], "flatten"),
        helper.make_node(
            "Gemm",
            ["flat", constant("head", head), constant(_BIAS, np.zeros(CLASSES, np.float32))],
            [OUTPUT],
            "classify",
        ),
    ]
    graph = helper.make_graph(
        nodes,
        "demo",
        [helper.make_tensor_value_info(INPUT, TensorProto.UINT8, [1, SIDE, SIDE, 3])],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, [1, CLASSES])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def make_images(count: int, seed: int = 1) -> NDArray[np.uint8]:
    """Return random images, uint8 [count, 320, 320, 3].

    They are sums of noise that is weaker at finer scales, so that they can be compressed like photographs.
    """
    rng = np.random.default_rng(seed)
    images = np.zeros((count, SIDE, SIDE, 3))
    fineness = rng.uniform(0.4, 0.8, (count, 1, 1, 1))
    for cells in _OCTAVES:
        coarse = rng.normal(0, 60 * (4 / cells) ** fineness, (count, cells + 1, cells + 1, 3))
        images += _enlarge(coarse, cells)
    images += rng.uniform(64, 192, (count, 1, 1, 3))
    return np.clip(np.rint(images), 0, 255).astype(np.uint8)


def _enlarge(coarse: NDArray[np.float64], cells: int) -> NDArray[np.float64]:
    """Interpolate a grid of `cells` + 1 points a side to the size of an image."""
    at = np.linspace(0, cells, SIDE)
    low = np.minimum(at.astype(int), cells - 1)
    share = at - low
    rows = coarse[:, low] * (1 - share)[None, :, None, None] + coarse[:, low + 1] * share[None, :, None, None]
    return np.asarray(
        rows[:, :, low] * (1 - share)[None, None, :, None] + rows[:, :, low + 1] * share[None, None, :, None]
    )


def pick_images(model: bytes, images: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Return up to `count` images, spread over all classes.

    The images are chosen so that small changes of their pixels do not change their class. Otherwise, lossy
    codecs would seem to cause errors.

    `images` are uint8 [n, 320, 320, 3].
    """
    noise = np.random.default_rng(0).integers(-_NOISE, _NOISE + 1, images.shape)
    noisy = np.clip(images.astype(np.int16) + noise, 0, 255).astype(np.uint8)
    scores, disturbed = run_model(model, images), run_model(model, noisy)
    classes = scores.argmax(axis=1)
    others = np.where(np.arange(CLASSES) == classes[:, None], -np.inf, disturbed).max(axis=1)
    best_first = np.argsort(others - np.take_along_axis(disturbed, classes[:, None], axis=1)[:, 0])
    # The rank of each image within its class: first the best of every class, then the second ones.
    rank = [int((classes[best_first[:at]] == classes[index]).sum()) for at, index in enumerate(best_first)]
    steady = [
        index
        for index in best_first[np.argsort(rank, kind="stable")]
        if others[index] < disturbed[index].max()
    ]
    return images[steady[:count]]
