"""The quantization schemes of engines, and the computation of scales from ranges.

Source: B. Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference, 2018, section 2.1, and ONNX operator QuantizeLinear.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NARROW_PEAK = 63


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantization scheme of the integer kernels of an engine.

    Attributes:
        name: The name in target files.
        symmetric: If True, activations are int8 with zero point 0, biases are float32, and each consumer of a
            tensor has its own Q/DQ pair, as TensorRT requires. If False, activations are uint8 with a zero
            point, and biases are int32 with the scale input scale x weight scale.
        elementwise: The operators with integer kernels besides matrix products and data movement.
        weight_peak: The largest quantized weight. It is 63 if the engine adds two products in 16 bits.
        folds_pixels: Whether convolutions with few channels process groups of pixels, see `litert.fold`.
        quantizes_outputs: Whether the output of a kernel is quantized even if no integer kernel reads it.
    """

    name: str
    symmetric: bool
    elementwise: frozenset[str]
    weight_peak: int = 127
    folds_pixels: bool = False
    quantizes_outputs: bool = True

    @property
    def is_narrow(self) -> bool:
        """Whether weights have 7-bit codes, so that the sum of two products fits into 16 bits."""
        return self.weight_peak <= _NARROW_PEAK


ASYMMETRIC = Scheme(
    name="asymmetric",
    symmetric=False,
    elementwise=frozenset(
        {"Add", "Mul", "Concat", "GlobalAveragePool", "AveragePool", "Sigmoid", "LeakyRelu"}
    ),
)
SYMMETRIC = Scheme(name="symmetric", symmetric=True, elementwise=frozenset({"Add"}), quantizes_outputs=False)
# For x86 without VNNI: vpmaddubsw saturates sums of two products at 16 bits.
ASYMMETRIC_7BIT = replace(ASYMMETRIC, name="asymmetric-7bit", weight_peak=_NARROW_PEAK)
# The form of LiteRT's kernels. `litert.kernels` lists the operators that have some.
LITERT = replace(ASYMMETRIC, name="litert", elementwise=frozenset())
# LiteRT's kernels for AVX-512 take eight input channels a step, and images have three.
LITERT_AVX512 = replace(LITERT, name="litert-avx512", folds_pixels=True)
# OpenVINO computes activation functions in the float sums of a product, before they become codes.
OPENVINO = Scheme(
    name="openvino",
    symmetric=False,
    elementwise=frozenset({"Add", "Concat", "GlobalAveragePool", "AveragePool"}),
    quantizes_outputs=False,
)
OPENVINO_7BIT = replace(OPENVINO, name="openvino-7bit", weight_peak=_NARROW_PEAK)
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        ASYMMETRIC,
        ASYMMETRIC_7BIT,
        SYMMETRIC,
        LITERT,
        LITERT_AVX512,
        OPENVINO,
        OPENVINO_7BIT,
    )
}


# A tensor that was always 0 gets an ordinary scale: with a product of tiny scales, int32 cannot hold a bias,
# and onnxruntime also converts the biases of products that stay in float to int32.
_SMALLEST_RANGE = 1e-12


@dataclass(frozen=True, slots=True)
class QuantizationParams:
    """A float32 scale of shape [] or [channels], and a uint8, int8 or int32 zero point of the same shape."""

    scale: NDArray[np.float32]
    zero_point: NDArray[Any]


def activation_params(low: float, high: float, scheme: Scheme) -> QuantizationParams:
    """Return the scale and zero point for a range, which is extended to include 0.

    If the range is empty, it is replaced by 0 to 1.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    if high - low < _SMALLEST_RANGE:
        high = 1.0
    if scheme.symmetric:
        scale = np.float32(max(-low, high) / 127)
        return QuantizationParams(np.asarray(scale), np.asarray(0, np.int8))
    scale = np.float32((high - low) / 255)
    zero = np.clip(np.rint(-low / np.float64(scale)), 0, 255)
    return QuantizationParams(np.asarray(scale), np.asarray(zero, np.uint8))


def fake_quantize(values: NDArray[Any], low: float, high: float, scheme: Scheme) -> NDArray[np.float32]:
    """Quantize `values` with the range from `low` to `high`, and return the dequantized result."""
    params = activation_params(low, high, scheme)
    limits = np.iinfo(params.zero_point.dtype)
    codes = np.clip(np.rint(values / params.scale) + params.zero_point, limits.min, limits.max)
    return np.asarray((codes - params.zero_point) * params.scale, np.float32)


def quantize_weight(
    weight: NDArray[np.float32],
    axis: int | None,
    min_scale: NDArray[np.float64] | float = 0.0,
    weight_peak: int = 127,
    exact: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.int8], QuantizationParams]:
    """Return the symmetric int8 codes of a weight and their scale.

    Args:
        weight: A float32 array of any shape.
        axis: The axis of the output channels, which get separate scales, or None for one scale.
        min_scale: The minimum scale, [] or [channels]. It prevents an overflow of int32 biases in channels
            with tiny weights.
        weight_peak: The largest code.
        exact: Scales [channels], if the weight is an integer multiple of them. They are used if the codes do
            not exceed `weight_peak` and the scales are not below `min_scale`. This requires `axis`.

    Returns:
        Codes from -weight_peak to weight_peak with the shape of the weight, and a scale [] or [channels] with
        zero point 0.
    """
    values = weight.astype(np.float64)
    if axis is None:
        peak = np.abs(values).max(initial=0.0)
        scale = np.asarray(max(peak / weight_peak, float(np.max(min_scale)), 1e-30)).astype(np.float32)
        shaped: NDArray[np.float64] = scale.astype(np.float64)
    else:
        others = tuple(a for a in range(values.ndim) if a != axis % values.ndim)
        peak = np.abs(values).max(axis=others, initial=0.0)
        if exact is not None:
            peak = np.where(peak / weight_peak > exact * 1.0001, peak, exact.astype(np.float64) * weight_peak)
        scale = np.maximum(np.maximum(peak / weight_peak, min_scale), 1e-30).astype(np.float32)
        along = [1] * values.ndim
        along[axis] = -1
        shaped = scale.astype(np.float64).reshape(along)
    codes = np.clip(np.rint(values / shaped), -weight_peak, weight_peak).astype(np.int8)
    return codes, QuantizationParams(scale, np.zeros(scale.shape, np.int8))
