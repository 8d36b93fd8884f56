"""Renders the content of a sample for a browser as a small JPEG, a short WAV or a line chart.

Browsers never get the original bytes from a device. Samples are rendered one at a time, and the number of
pixels of an image is checked before it is decoded.
"""

import io
import threading
from dataclasses import dataclass
from typing import Final

import numpy as np
from markupsafe import Markup

from edgekit_runtime.errors import DataError, EdgekitError
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.preprocessing.wav import write_wav
from edgekit_runtime.protocol.samples import Sample
from edgekit_runtime.tensors import DTYPES, Array

SIDES: Final = {"small": 320, "large": 1280}
_MAX_PIXELS: Final = 50_000_000
_MAX_SOUND_S: Final = 60
_MAX_RATE: Final = 192_000
_POINTS: Final = 320  # of a line
_HEIGHT: Final = 120
_renderer: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class SampleContent:
    """Content for a browser: `data` with the MIME type `media_type`."""

    data: bytes
    media_type: str


def render_content(sample: Sample, side: int) -> SampleContent:
    """Return the content of a sample. For a damaged sample, it is a picture of the error message.

    `side` is the maximum side of a picture in pixels.
    """
    try:
        with _renderer:
            return _render(sample, side)
    except (EdgekitError, ValueError, MemoryError) as error:
        words = Markup.escape(str(error)[:50])
        text = f'<text x="8" y="60" font-family="sans-serif" font-size="13" fill="#d2603f">{words}</text>'
        return SampleContent(_svg(text), "image/svg+xml")


def _render(sample: Sample, side: int) -> SampleContent:
    if not sample.header.media_type:
        return SampleContent(_draw_line(_read_tensor(sample)), "image/svg+xml")
    media = MediaType.parse(sample.header.media_type)
    if media.is_image:
        image = media.read_image(sample.input, _MAX_PIXELS)
        image.thumbnail((side, side))
        output = io.BytesIO()
        image.convert("RGB").save(output, "JPEG", quality=85)
        return SampleContent(output.getvalue(), "image/jpeg")
    amplitudes, rate = media.read_amplitudes(sample.input)
    if not 0 < rate <= _MAX_RATE:
        raise DataError(f"the recording has {rate} samples a second")
    return SampleContent(write_wav(amplitudes[: _MAX_SOUND_S * rate], rate), "audio/wav")


def _read_tensor(sample: Sample) -> Array:
    """Return the values of the first tensor.

    Raises:
        DataError: The values do not match their shape.
    """
    tensor = sample.header.tensors[0]
    if tensor.dtype not in DTYPES or DTYPES[tensor.dtype].kind not in "fiub":
        raise DataError(f"tensor '{tensor.name}' holds {tensor.dtype}")
    dtype = DTYPES[tensor.dtype].newbyteorder("<")
    count = min(int(np.prod(tensor.shape, dtype=object)), len(sample.input) // dtype.itemsize)
    return np.frombuffer(sample.input, dtype, max(0, count)).astype(np.float64)


def _draw_line(values: Array) -> bytes:
    """Return a line through means of the values, left to right."""
    values = values[np.isfinite(values)]
    if not len(values):
        raise DataError("there are no finite numbers")
    means = np.array([part.mean() for part in np.array_split(values, min(_POINTS, len(values)))])
    low, high = float(means.min()), float(means.max())
    rows = (_HEIGHT - 20) * (1 - (means - low) / ((high - low) or 1)) + 10
    columns = np.linspace(4, _POINTS - 4, len(means))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(columns, rows, strict=True))
    return _svg(f'<polyline points="{points}" fill="none" stroke="#3d87c4" stroke-width="1.5"/>')


def _svg(content: str) -> bytes:
    size = f'viewBox="0 0 {_POINTS} {_HEIGHT}" width="{_POINTS}" height="{_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{content}</svg>'.encode()
