"""Convolutions of few channels that make several pixels at a time, for LiteRT with AVX-512."""

from collections.abc import Iterator

import numpy as np
import pytest
from tests.toolkit.cases import cases
from tests.toolkit.small_tflite import Array, Lite

from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession
from edgekit_toolkit.costs.tflite_operators import tflite_costs
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.scheme import LITERT, LITERT_AVX512, Scheme
from edgekit_toolkit.tflite.flatbuffer import operator_name, operators, parse, shape_of


def stem(
    row: int,
    channels: int,
    out: int,
    width: int,
    stride: int,
    *,
    free_batch: bool = False,
    padding: int = 0,
    depthwise: bool = False,
) -> bytes:
    """A convolution of x [1, 8, row, channels] and one of 1 x 1 behind it."""
    rng = np.random.default_rng(3)
    lite = Lite()
    made = -(-row // stride) if padding == 0 else (row - width) // stride + 1
    rows = 8 // stride if depthwise else 4 if padding == 0 else 3
    shapes = {"x": (1, 8, row, channels), "a": (1, rows, made, out), "y": (1, rows, made, 5)}
    for name, shape in shapes.items():
        lite.tensor(name, shape).shapeSignature = [-1, *shape[1:]] if free_batch else None
    weights = {"v": (1 if depthwise else out, 3, width, channels), "w": (5, 1, 1, out)}
    for name, shape in weights.items():
        lite.constant(name, rng.normal(size=shape).astype(np.float32))
        lite.constant(f"{name}_b", rng.normal(size=out if name == "v" else 5).astype(np.float32))
    common = {"padding": padding, "fusedActivationFunction": 1}
    first = {**common, "strideH": stride if depthwise else 2, "strideW": stride}
    if depthwise:
        first["depthMultiplier"] = 1
        lite.operator("DEPTHWISE_CONV_2D", ["x", "v", "v_b"], ["a"], "DepthwiseConv2DOptions", **first)
    else:
        lite.operator("CONV_2D", ["x", "v", "v_b"], ["a"], "Conv2DOptions", **first)
    lite.operator("CONV_2D", ["a", "w", "w_b"], ["y"], "Conv2DOptions", strideH=1, strideW=1, **common)
    lite.ends(["x"], ["y"])
    return lite.content()


def samples(content: bytes, batch: int = 1) -> Iterator[dict[str, Array]]:
    rng = np.random.default_rng(7)
    shape = shape_of(parse(content).subgraphs[0].tensors[0])
    for _ in range(4):
        yield {"x": rng.random((batch, *shape[1:]), np.float32)}


def static(content: bytes, scheme: Scheme, *, without: frozenset[str] = frozenset()) -> bytes:
    quantizer = LiteRtQuantizer(content, threads=1, scheme=scheme)
    kernels = quantizer.kernels(elementwise=True)
    ranges = quantizer.ranges(kernels, lambda: samples(content), lambda: None)
    plan = Plan(scheme, frozenset(kernels) - without, {name: one.whole() for name, one in ranges.items()})
    made = quantizer.build(Form.from_json(Form(forms.STATIC_INT8, plan).to_json()))
    assert made is not None
    return made.content


def run(content: bytes, feeds: dict[str, Array]) -> Array:
    return LiteRtSession(content, LiteRtOptions(threads=1)).run(feeds)["y"]


def first_filters(content: bytes) -> tuple[int, ...]:
    model = parse(content)
    return next(
        shape_of(graph.tensors[operator.inputs[1]])
        for graph, _, operator in operators(model)
        if operator_name(model, operator) == "CONV_2D"
    )


@cases(
    ("row", "channels", "out", "width", "stride", "filters"),
    [
        (8, 3, 8, 3, 2, (16, 3, 2, 12)),  # MobileNet at a quarter of its width
        (6, 3, 8, 3, 2, (8, 3, 2, 6)),  # four pixels do not divide the row
        (8, 3, 32, 3, 2, (32, 3, 2, 6)),  # EfficientNet-Lite0: the output is wide enough as it is
        (8, 1, 4, 3, 1, (16, 3, 3, 4)),  # a pixel of padding on either side
        (8, 1, 4, 2, 2, (16, 3, 1, 8)),  # no padding
        (12, 1, 4, 5, 2, (8, 3, 3, 4)),  # five pixels from one before
    ],
)
def test_narrow_convolution_makes_several_pixels_and_the_same_codes(
    row: int, channels: int, out: int, width: int, stride: int, filters: tuple[int, ...]
) -> None:
    content = stem(row, channels, out, width, stride)
    plain, folded = static(content, LITERT), static(content, LITERT_AVX512)
    assert (first_filters(plain), first_filters(folded)) == ((out, 3, width, channels), filters)
    for feeds in samples(content):
        np.testing.assert_array_equal(run(folded, feeds), run(plain, feeds))


@pytest.mark.parametrize(
    ("channels", "stride", "filters"),
    [
        (8, 1, (16, 3, 3, 16)),  # MobileNet at a quarter of its width
        (8, 2, (16, 3, 2, 32)),
        (4, 1, (16, 3, 3, 16)),
        (16, 1, (5, 1, 1, 16)),  # whole steps as it is: the first CONV_2D is the one behind it
    ],
)
def test_depthwise_convolution_of_few_channels_is_made_dense_with_the_same_codes(
    channels: int, stride: int, filters: tuple[int, ...]
) -> None:
    content = stem(8, channels, channels, 3, stride, depthwise=True)
    plain, folded = static(content, LITERT), static(content, LITERT_AVX512)
    assert first_filters(folded) == filters
    for feeds in samples(content):
        np.testing.assert_array_equal(run(folded, feeds), run(plain, feeds))


def test_any_shape_gives_the_same_codes_folded_or_not() -> None:
    rng = np.random.default_rng(11)  # three channels at least: XNNPACK refuses a tensor that is all 0
    folded_count = 0
    for _ in range(40):
        stride, channels = (int(rng.choice(values)) for values in ((1, 2, 4), (3, 4, 5, 8)))
        depthwise = bool(rng.random() < 0.5)
        row, width, out = (int(rng.integers(least, most)) for least, most in ((1, 17), (1, 8), (3, 17)))
        content = stem(row, channels, channels if depthwise else out, width, stride, depthwise=depthwise)
        plain, folded = static(content, LITERT), static(content, LITERT_AVX512)
        folded_count += plain != folded
        for feeds in samples(content):
            np.testing.assert_array_equal(run(folded, feeds), run(plain, feeds))
    assert folded_count >= 10


@pytest.mark.parametrize("depthwise", [False, True])
def test_work_of_a_folded_convolution_is_counted_as_before(depthwise: bool) -> None:
    content = stem(8, 8 if depthwise else 3, 8, 3, 1 if depthwise else 2, depthwise=depthwise)
    plain, folded = (
        sum(cost.macs for cost in tflite_costs(parse(static(content, scheme))))
        for scheme in (LITERT, LITERT_AVX512)
    )
    assert folded == plain


@pytest.mark.parametrize(
    "shape",
    [
        (7, 3, 8, 3, 2),  # an odd row
        (8, 8, 16, 3, 2),  # whole steps as it is
        (8, 3, 16, 3, 1),  # ResNet-8: as many steps either way
    ],
)
def test_convolution_that_would_not_gain_stays(shape: tuple[int, int, int, int, int]) -> None:
    content = stem(*shape)
    assert static(content, LITERT_AVX512) == static(content, LITERT)


def test_convolution_without_padding_stays() -> None:
    content = stem(8, 3, 8, 3, 2, padding=1)
    assert static(content, LITERT_AVX512) == static(content, LITERT)


def test_convolution_left_in_float_stays() -> None:
    content = stem(8, 3, 8, 3, 2)
    assert first_filters(static(content, LITERT_AVX512, without=frozenset({"a"}))) == (8, 3, 3, 3)


def test_folded_model_takes_any_batch() -> None:
    content = stem(8, 3, 8, 3, 2, free_batch=True)
    plain, folded = static(content, LITERT), static(content, LITERT_AVX512)
    assert first_filters(folded) == (16, 3, 2, 12)
    for feeds in samples(content, batch=3):
        np.testing.assert_array_equal(run(folded, feeds), run(plain, feeds))
