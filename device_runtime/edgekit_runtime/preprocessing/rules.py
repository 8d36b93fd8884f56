"""The preprocessing file: how a photograph or a recording becomes the input of a model.

The fields are documented in docs/guide/samples.md. This module reads them and checks them against the model's
input; `images` and `audio` apply them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import DataError
from edgekit_runtime.preprocessing.audio import AudioRules
from edgekit_runtime.preprocessing.features import FeatureRules
from edgekit_runtime.preprocessing.images import ALIGNMENTS, COLOURS, INTERPOLATIONS, LAYOUTS, ImageRules
from edgekit_runtime.tensors import TensorSpec

MediaRules = ImageRules | AudioRules

# Source: torchvision's ImageClassification transform of the classic ImageNet models.
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "imagenet": {
        "type": "image",
        "resize": 256,
        "interpolation": "bilinear",
        "center_crop": 224,
        "colour": "RGB",
        "scale": 1 / 255,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    }
}
_IMAGE_FIELDS: Final = (
    "type",
    "resize",
    "interpolation",
    "center_crop",
    "letterbox",
    "fill",
    "align",
    "colour",
    "scale",
    "mean",
    "std",
    "layout",
    "dtype",
)
_AUDIO_FIELDS: Final = (
    *("type", "sample_rate", "samples", "hop", "resample", "features"),
    *("scale", "mean", "std", "dtype"),
)
_DEFAULT_SIZE: Final = 224  # size in an example for a model with free height and width
_DEFAULT_RATE: Final = 16000
_MAX_SIDE: Final = 1 << 14
_MAX_SAMPLES: Final = 1 << 28


def expand_preset(preprocessing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the named preset; given fields replace those of the preset.

    Raises:
        DataError: there is no such preset.
    """
    fields = dict(preprocessing)
    name = fields.pop("preset", None)
    if name is None:
        return fields
    if not isinstance(name, str) or name not in PRESETS:
        raise DataError(f"preprocessing: there is no preset {name!r}, expected one of {', '.join(PRESETS)}")
    return {**PRESETS[name], **fields}


def read_rules(preprocessing: Mapping[str, Any], spec: TensorSpec) -> MediaRules:
    """Return the rules that a preprocessing file states for a model's only input.

    Args:
        preprocessing: the fields.
        spec: the model's input; layout, dtype and colour come from it if they are not stated.

    Raises:
        DataError: an unknown field, a value that cannot be used, or rules that do not fit the input.
    """
    kind = preprocessing.get("type", "image")
    if kind not in ("image", "audio"):
        raise _wrong("type", kind, '"image" or "audio"')
    fields = _IMAGE_FIELDS if kind == "image" else _AUDIO_FIELDS
    for name in preprocessing:
        if name not in fields:
            import difflib  # only for this error

            near = difflib.get_close_matches(name, fields, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise DataError(f"preprocessing: unknown field '{name}', expected {', '.join(fields)}.{hint}")
    if preprocessing.get("dtype", spec.dtype) != spec.dtype:
        raise _wrong("dtype", preprocessing["dtype"], f"\"{spec.dtype}\", which input '{spec.name}' takes")
    return _image_rules(preprocessing, spec) if kind == "image" else _audio_rules(preprocessing, spec)


def example_for(inputs: Sequence[TensorSpec], kind: str) -> str | None:
    """Return a preprocessing file for a model with these inputs, on one line; None if none can fit.

    Args:
        inputs: inputs of the model.
        kind: `image` or `audio`.
    """
    if len(inputs) != 1:
        return None
    spec = inputs[0]
    if kind == "audio":
        length = _audio_length(spec)
        if length is None:
            return None
        fields: dict[str, Any] = {"type": "audio", "sample_rate": _DEFAULT_RATE}
        return json.dumps(fields | ({"samples": length} if isinstance(length, int) else {}))
    layout = _layout(spec)
    if layout is None:
        return None
    sizes = dict(zip(layout, spec.shape, strict=True))
    channels = sizes["C"] if sizes["C"] in (1, 3) else 3
    side = [size if isinstance(size, int) else _DEFAULT_SIZE for size in (sizes["H"], sizes["W"])]
    return json.dumps(
        {
            "resize": side,
            "colour": "RGB" if channels == 3 else "L",
            "scale": 1 / 255,
            "mean": [0] * channels,
            "std": [1] * channels,
            "layout": layout,
            "dtype": spec.dtype,
        }
    )


def _image_rules(fields: Mapping[str, Any], spec: TensorSpec) -> ImageRules:
    layout = fields.get("layout", _layout(spec))
    if len(spec.shape) != 4 or layout is None:
        raise DataError(
            f"input '{spec.name}' {list(spec.shape)} takes no images: expected [N, channels, height, width]"
            " or [N, height, width, channels] with 1 or 3 channels; give arrays (.npz) instead"
        )
    _one_of("layout", layout, LAYOUTS)
    channels = spec.shape[layout.index("C")]
    colour = fields.get("colour", "L" if channels == 1 else "RGB")
    _one_of("colour", colour, COLOURS)
    interpolation = fields.get("interpolation", "bilinear")
    _one_of("interpolation", interpolation, INTERPOLATIONS)
    if "scale" not in fields:
        raise DataError(
            f"preprocessing: 'scale' is missing; {1 / 255} turns pixels 0..255 into 0..1 (as ToTensor of"
            " torchvision does), 1 leaves them"
        )
    count = len(COLOURS[colour])
    if isinstance(channels, int) and channels != count:
        raise _wrong("colour", colour, f"one of {channels} channels, which input '{spec.name}' has")
    resize, letterbox = fields.get("resize"), _sides("letterbox", fields.get("letterbox"))
    if letterbox is not None and (other := fields.keys() & {"resize", "center_crop"}):
        raise DataError(f"preprocessing: 'letterbox' fits the whole image; remove '{min(other)}'")
    align = fields.get("align", "centre")
    _one_of("align", align, ALIGNMENTS)
    return ImageRules(
        resize=_side("resize", resize) if isinstance(resize, int) else _sides("resize", resize),
        interpolation=interpolation,
        center_crop=_sides("center_crop", fields.get("center_crop")),
        colour=colour,
        scale=_number("scale", fields["scale"]),
        mean=_numbers("mean", fields.get("mean", 0), count),
        std=_numbers("std", fields.get("std", 1), count, zero=False),
        layout=layout,
        dtype=spec.dtype,
        letterbox=letterbox,
        fill=_whole("fill", fields.get("fill", 114), 255, least=0),
        align=align,
    )


def _audio_rules(fields: Mapping[str, Any], spec: TensorSpec) -> AudioRules:
    samples = fields.get("samples")
    samples = None if samples is None else _whole("samples", samples, _MAX_SAMPLES)
    hop = fields.get("hop")
    if hop is not None:
        hop = _whole("hop", hop, samples or 0)
    features = None
    if "features" in fields:
        features = from_plain(FeatureRules, fields["features"], "preprocessing: features", DataError)
    elif _audio_length(spec) is None:
        raise DataError(
            f"input '{spec.name}' {list(spec.shape)} takes no sound: expected float [N, samples],"
            " [N, 1, samples] or [N, samples, 1]; state 'features' of the sound, or compute them yourself and"
            " give arrays (.npz)"
        )
    sample_rate = _whole("sample_rate", fields.get("sample_rate"), 1 << 20)
    if features is not None and features.high_hz > sample_rate / 2:
        raise _wrong("features.high_hz", features.high_hz, f"at most half of the sample rate {sample_rate}")
    resample = fields.get("resample", False)
    if not isinstance(resample, bool):
        raise _wrong("resample", resample, "true or false")
    return AudioRules(
        sample_rate=sample_rate,
        samples=samples,
        hop=hop,
        resample=resample,
        scale=_number("scale", fields.get("scale", 1)),
        mean=_number("mean", fields.get("mean", 0)),
        std=_numbers("std", fields.get("std", 1), 1, zero=False)[0],
        dtype=spec.dtype,
        features=features,
        **_arrange_sound(spec, features, samples),
    )


def _arrange_sound(spec: TensorSpec, features: FeatureRules | None, samples: int | None) -> dict[str, Any]:
    """Return how sound, or features [frames, values], lie in the input, for `AudioRules`."""
    sizes = spec.shape[1:]
    if features is None:
        return {"channel_axis": None if len(sizes) == 1 else 0 if sizes[0] == 1 else 1}
    channel_axis = next((axis for axis in (0, 2) if len(sizes) == 3 and sizes[axis] == 1), None)
    stated = [size for axis, size in enumerate(sizes) if axis != channel_axis]
    if len(stated) not in (1, 2):
        raise DataError(
            f"input '{spec.name}' {list(spec.shape)} takes no features of sound: expected [N, frames, values]"
            " or [N, values, frames], also flat or with an axis of size 1"
        )
    frames = 0 if samples is None else features.count_frames(samples)  # 0 is any number
    is_flat = len(stated) == 1
    is_transposed = not is_flat and stated[0] == features.width != stated[1]
    computed = [features.width, frames] if is_transposed else [frames, features.width]
    computed = [math.prod(computed)] if is_flat else computed
    pairs = zip(stated, computed, strict=True)
    if any(isinstance(size, int) and count not in (0, size) for size, count in pairs):
        raise DataError(
            f"preprocessing: the features are {computed}, but input '{spec.name}' takes {stated}; change"
            " 'samples' or the features"
        )
    return {"channel_axis": channel_axis, "is_flat": is_flat, "is_transposed": is_transposed}


def _layout(spec: TensorSpec) -> str | None:
    """Return the layout of an image input, by its shape; None if it takes no images."""
    if len(spec.shape) != 4:
        return None
    return next((layout for layout in LAYOUTS if spec.shape[layout.index("C")] in (1, 3)), None)


def _audio_length(spec: TensorSpec) -> int | str | None:
    """Return the number of samples that a sound input takes, or its name; None if it takes no sound."""
    if not spec.dtype.startswith("float") or len(spec.shape) not in (2, 3):
        return None
    sizes = spec.shape[1:]
    if len(sizes) == 2 and 1 not in sizes:
        return None
    return sizes[0] if len(sizes) == 1 or sizes[1] == 1 else sizes[1]


def _wrong(name: str, value: object, expected: str) -> DataError:
    return DataError(f"preprocessing: '{name}' is {json.dumps(value)}, expected {expected}")


def _one_of(name: str, value: object, allowed: Sequence[str] | Mapping[str, Any]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise _wrong(name, value, f"one of {', '.join(allowed)}")


def _whole(name: str, value: object, greatest: int, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= greatest:
        raise _wrong(name, value, f"a whole number from {least} to {greatest}")
    return value


def _side(name: str, value: object) -> int:
    return _whole(name, value, _MAX_SIDE)


def _sides(name: str, value: object) -> tuple[int, int] | None:
    """Return (height, width) in pixels; a number stands for a square."""
    if value is None:
        return None
    pair = value if isinstance(value, list) else [value, value]
    if len(pair) != 2:
        raise _wrong(name, value, "a number of pixels or [height, width]")
    return _side(name, pair[0]), _side(name, pair[1])


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(name, value, "a number")
    return float(value)


def _numbers(name: str, value: object, count: int, *, zero: bool = True) -> tuple[float, ...]:
    """Return a number for each channel; a single number is for all."""
    items = value if isinstance(value, list) else [value]
    if len(items) not in (1, count):
        raise _wrong(name, value, f"a number, or a list of {count} (one a channel)")
    numbers = tuple(_number(name, item) for item in items)
    if not zero and 0.0 in numbers:
        raise _wrong(name, value, "numbers other than 0, by which values are divided")
    return numbers if len(numbers) == count else numbers * count
