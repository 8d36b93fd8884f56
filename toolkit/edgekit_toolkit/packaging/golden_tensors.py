"""Golden inputs and expected outputs for the self-test on the device.

The inputs are generated from random numbers. The user's samples are not used, because they may be private and
a recipe must rebuild the package without them. Inputs are stored as 8-bit codes in blocks, so that a large
image needs only a few kilobytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.package.golden import Codes, GoldenInput, GoldenOutput, draw_bytes
from edgekit_runtime.package.row_sets import AlignedRows, align_rows
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.packaging.golden_rows import (
    NOISE_FACTOR,
    distance,
    pack_values,
    sigmoid_error,
    state_tolerance,
)
from edgekit_toolkit.samples.generated import Feeds, generate_feeds

Array = NDArray[Any]
Outputs = Mapping[str, Array]

# Larger inputs are stored in blocks of equal values. Of larger outputs, every k-th value is stored.
_MAX_INPUT_ELEMENTS: Final = 1024
_MAX_OUTPUT_ELEMENTS: Final = 4096
_MIN_NOISE: Final = 64  # values, as fewer cost little
_SCALE_DIGIT: Final = 5e-5  # a scale has five digits, and codes stay within the range
# Other engines and processors round differently. Then codes of an int8 model may differ by a step or two in
# each layer, a float model only in its last bits.
_TOLERANCE: Final = {"int8": 0.10, "float": 0.005}


def golden_feeds(
    inputs: Sequence[TensorSpec],
    dims: Mapping[str, int],
    ranges: Mapping[str, tuple[float, float]],
    seed: int,
) -> tuple[tuple[GoldenInput, ...], dict[str, bytes], Feeds]:
    """Generate golden inputs, and return their descriptions, their artifacts and the decoded arrays.

    The artifacts are a dict from paths to contents. The arrays are the same as on the device.

    Args:
        inputs: The specs of the inputs.
        dims: The sizes of the free dimensions, by name.
        ranges: A dict from each input to its smallest and largest value in the calibration samples.
        seed: The random seed.
    """
    feeds = generate_feeds(inputs, 1, seed, dims, ranges)[0]
    described: list[GoldenInput] = []
    artifacts: dict[str, bytes] = {}
    decoded: Feeds = {}
    for position, spec in enumerate(inputs):
        path = f"golden/input{position}.bin"
        golden, data = golden_input(spec.name, feeds[spec.name], path, seed=position)
        described.append(golden)
        artifacts[path] = data
        decoded[spec.name] = golden.decode(data)
    return tuple(described), artifacts, decoded


def golden_input(name: str, value: NDArray[Any], path: str, *, seed: int = 0) -> tuple[GoldenInput, bytes]:
    """Encode an array as a golden input, and return its description and the content of its artifact.

    float32 arrays are stored as 8-bit codes, so the device decodes slightly different values. A large float32
    array is replaced by noise of the same shape and range.

    Args:
        name: The name of the input.
        value: An array without NaN and infinities.
        path: The path of the artifact.
        seed: The seed of the noise.
    """
    if value.dtype == np.float32 and value.size:
        codes, stored = _encode(value, seed)
    else:
        codes, stored = None, value
    data = np.ascontiguousarray(stored).astype(stored.dtype.newbyteorder("<")).tobytes()
    return GoldenInput(name, value.dtype.name, value.shape, path, codes), data


def _encode(value: NDArray[Any], seed: int) -> tuple[Codes, NDArray[np.uint8]]:
    repeat = _repeat(value.shape)
    low, high = float(value.min()), float(value.max())
    scale = float(f"{(high - low) / 255 * (1 - _SCALE_DIGIT):.5g}") or 1.0
    offset = float(str(np.float32(low)))
    codes = Codes("uint8", scale, offset, repeat=repeat if max(repeat, default=1) > 1 else None)
    shape = codes.stored_shape(value.shape)
    if low == high:  # a model may take another branch for other values
        return codes, np.zeros(shape, np.uint8)
    if value.size >= _MIN_NOISE:
        return codes, draw_bytes(seed, 0, math.prod(shape)).reshape(shape)
    blocks = value[tuple(slice(None, None, step) for step in repeat)]
    return codes, np.clip(np.rint((blocks - offset) / scale), 0, 255).astype(np.uint8)


def _repeat(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return block sizes that bring the number of stored values under the limit, the longest axes first."""
    repeat = [1] * len(shape)
    while np.prod([size // step for size, step in zip(shape, repeat, strict=True)]) > _MAX_INPUT_ELEMENTS:
        blocks = [size // step for size, step in zip(shape, repeat, strict=True)]
        order = sorted(range(len(shape)), key=lambda axis: -blocks[axis])
        axis = next((axis for axis in order if blocks[axis] > 1), None)
        if axis is None:
            break
        repeat[axis] *= next(factor for factor in range(2, blocks[axis] + 1) if blocks[axis] % factor == 0)
    return tuple(repeat)


def check_outputs(outputs: Mapping[str, NDArray[Any]]) -> None:
    """Check that the self-test can compare the outputs of the float model for the golden inputs.

    Raises:
        DataError: An output contains NaN, or all of its values are infinite.
    """
    for name, value in outputs.items():
        if value.dtype.kind != "f" or not value.size:
            continue
        if np.isnan(value).any() or not np.isfinite(value).any():
            kind = "NaN" if np.isnan(value).any() else "infinite in every value"
            raise DataError(
                f"output '{name}' is {kind} for generated inputs (in the range of the samples, without any"
                " from -1 to 1); give --calibration with real samples, whose range the model takes, or export"
                " a sound model"
            )


def golden_outputs(
    outputs: Outputs,
    floats: Outputs,
    *,
    integer: bool,
    axes: Mapping[str, int] | None = None,
    jittered: Sequence[Outputs] = (),
) -> tuple[tuple[GoldenOutput, ...], dict[str, bytes]]:
    """Return the expected outputs with tolerances, and the contents of their artifacts by path.

    Args:
        outputs: The outputs of the packaged model for the golden inputs.
        floats: The outputs of the float model. Their distance from `outputs` is included in the tolerance.
        integer: Whether the packaged model computes in int8.
        axes: A dict from the name of each output with a data-dependent number of rows to the index of the
            axis of the rows. Such rows are compared as a set.
        jittered: The outputs of the packaged model for inputs changed by `off_by_codes`. Their differences
            from `outputs` determine the tolerances, and how many rows of a set may differ.

    Raises:
        DataError: An output of the float model contains NaN, or all of its values are infinite.
    """
    described: list[GoldenOutput] = []
    artifacts: dict[str, bytes] = {}
    check_outputs(floats)
    axes = axes or {}
    aligned = align_rows(outputs, floats, axes).outputs
    moved = [align_rows(noisy, outputs, axes) for noisy in jittered]
    for position, (name, value) in enumerate(outputs.items()):
        path, axis = f"golden/output{position}.bin", axes.get(name)
        noisy = [other[name] for other in jittered] if axis is None else []
        atol = _atol(aligned.get(name, value), floats[name], noisy, integer=integer)
        golden = GoldenOutput(
            name=name,
            dtype=value.dtype.name,
            shape=value.shape,
            path=path,
            atol=atol,
            rtol=0.0,
            every=max(1, -(-value.size // _MAX_OUTPUT_ELEMENTS)),
            axis=axis,
        )
        if axis is not None:
            golden = _loosen(golden, value, moved)
        # Rows that are compared as a set keep all digits: rounded ones might have other counterparts.
        artifacts[path] = pack_values(golden.pick(value), atol if axis is None else 0.0)
        described.append(golden)
    return tuple(described), artifacts


def _loosen(golden: GoldenOutput, value: Array, moved: Sequence[AlignedRows]) -> GoldenOutput:
    """Return the description of a set of rows with how many of them may differ, and their number."""
    name, axis, changed_rows, drift = golden.name, golden.axis or 0, 0, 0
    for rows in moved:
        apart = np.abs(rows.outputs[name].astype(np.float64) - value) > golden.atol
        changed = np.moveaxis(apart, axis, -1).any(axis=tuple(range(value.ndim - 1))) | rows.missing[name]
        changed_rows = max(changed_rows, int(np.count_nonzero(changed)))
        drift = max(drift, abs(rows.extra[name] - int(np.count_nonzero(rows.missing[name]))))
    loose = _allow(changed_rows / golden.every, golden.stored_shape[axis])
    return replace(golden, loose=loose, count_atol=_allow(drift, value.shape[axis]))


def _allow(noise: float, rows: int) -> int:
    """Return twice the noise, as a number of rows; at most a quarter of them, or wrong models pass."""
    return min(max(1, math.ceil(2 * noise)), -(-rows // 4), rows // 2)


def _atol(value: Array, reference: Array, jittered: Sequence[Array], *, integer: bool) -> float:
    if value.dtype.kind != "f":
        return 0.0
    finite = np.isfinite(value) & np.isfinite(reference)
    values = reference[finite].astype(np.float64)
    scale = max(float(np.ptp(values)), float(np.abs(values).max())) if values.size else 0.0
    apart = float(np.abs(value[finite] - values).max(initial=0.0))
    share = _TOLERANCE["int8" if integer else "float"]
    own = max(share * max(scale, 1e-6), sigmoid_error(reference))
    noise = max((float(distance(value, other).max()) for other in jittered), default=0.0)
    # A form that is far from float must not get a large tolerance for that, but for what rounding moves.
    atol = own + (max(min(apart, own), NOISE_FACTOR * noise) if integer else 0.0)
    return state_tolerance(atol)
