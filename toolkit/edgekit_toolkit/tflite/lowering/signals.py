"""Fourier transforms, as products with the matrices that define them."""

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.lowering.body import Body, Value, lowers
from edgekit_toolkit.tflite.refusal import RefusedError


def _transform(length: int, size: int, *, inverse: bool, bins: int) -> NDArray[np.float32]:
    """Return the matrix [2 * size, 2 * bins] of real and imaginary parts; values beyond `length` are 0."""
    angles = 2 * np.pi * (np.outer(np.arange(size), np.arange(bins)) % length) / length
    cosine, sine = np.cos(angles), np.sin(angles) * (1 if inverse else -1)
    whole = np.block([[cosine, sine], [-sine, cosine]]) / (length if inverse else 1)
    return whole.astype(np.float32)


@lowers("DFT")
def _dft(body: Body) -> Value:
    shape, rank = body.shape(0), len(body.shape(0))
    stated = body.constant(2, "the axis").reshape(()) if body.has(2) else None
    axis = int(body.attribute("axis", 1 if body.opset < 20 else -2) if stated is None else stated) % rank
    length = int(body.constant(1, "dft_length").reshape(())) if body.has(1) else shape[axis]
    inverse, onesided = bool(body.attribute("inverse", 0)), bool(body.attribute("onesided", 0))
    if inverse and onesided:
        raise RefusedError("inverse and onesided together are not covered")
    used, bins = min(length, shape[axis]), body.out_shape()[axis]
    matrix = _transform(length, used, inverse=inverse, bins=bins)
    matrix = matrix if shape[-1] == 2 else matrix[:used]
    order = [*(other for other in range(rank - 1) if other != axis), rank - 1, axis]
    outer = [shape[other] for other in order[:-2]]
    rows = body.input(0).slice(axis, 0, used).transpose(order).reshape(*outer, shape[-1] * used)
    spectrum = rows.op("MatMul", matrix).reshape(*outer, 2, bins)
    return spectrum.transpose(np.argsort(order).tolist())


@lowers("STFT")
def _stft(body: Body) -> Value:
    """Gather the frames of a signal [B, T, 1], and multiply by window and matrix: [B, frames, bins, 2]."""
    batch, samples = body.shape(0)[:2]
    if len(body.shape(0)) == 3 and body.shape(0)[2] == 2:
        raise RefusedError("a signal of complex numbers is not covered, one of real numbers is")
    step = int(body.constant(1, "frame_step").reshape(()))
    length = int(body.constant(3, "frame_length").reshape(())) if body.has(3) else body.shape(2)[0]
    frames, bins = body.out_shape()[1:3]
    places = np.arange(frames)[:, None] * step + np.arange(length)
    rows = body.input(0).reshape(batch, samples).op("Gather", places, axis=1)
    if body.has(2):
        rows = rows * body.input(2)
    spectrum = rows.op("MatMul", _transform(length, length, inverse=False, bins=bins)[:length])
    return spectrum.reshape(batch, frames, 2, bins).transpose([0, 1, 3, 2])
