"""The preprocessing file: how an image or a recording becomes the input of a model.

docs/guide/samples.md documents the fields. This module parses the file and checks it against the model's
input. `images` and `audio` apply the rules.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import DataError
from edgekit_runtime.preprocessing.audio import AudioRules
from edgekit_runtime.preprocessing.features import FeatureRules
from edgekit_runtime.preprocessing.images import LAYOUTS, ImageRules
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
_IMAGE_FIELDS: Final = ("type", *ImageRules.__dataclass_fields__)
_AUDIO_FIELDS: Final = tuple("type sample_rate samples hop resample features scale mean std dtype".split())
_DEFAULT_SIZE: Final = 224  # size in an example for a model with free height and width
_DEFAULT_RATE: Final = 16000


def expand_preset(preprocessing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a preprocessing file, with missing fields taken from the preset named in `preset`.

    Raises:
        DataError: There is no such preset.
    """
    fields = dict(preprocessing)
    name = fields.pop("preset", None)
    if name is None:
        return fields
    if not isinstance(name, str) or name not in PRESETS:
        raise DataError(f"preprocessing: there is no preset {name!r}, expected one of {', '.join(PRESETS)}")
    return {**PRESETS[name], **fields}


def read_rules(preprocessing: Mapping[str, Any], spec: TensorSpec) -> MediaRules:
    """Parse the fields of a preprocessing file for a model with a single input, which `spec` describes.

    Layout, dtype and colour default to those of the input. A preset must be expanded first.

    Raises:
        DataError: A field is unknown, a value is not usable, or the rules do not fit the input.
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
    stated = {**preprocessing, "dtype": spec.dtype}
    stated.pop("type", None)
    return _image_rules(stated, spec) if kind == "image" else _audio_rules(stated, spec)


def example_for(inputs: Sequence[TensorSpec], kind: str) -> str | None:
    """Return an example preprocessing file as one line of JSON, or None if none fits the inputs.

    `kind` is `image` or `audio`.
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


def _image_rules(fields: dict[str, Any], spec: TensorSpec) -> ImageRules:
    layout = fields.setdefault("layout", _layout(spec))
    if len(spec.shape) != 4 or layout is None:
        raise DataError(
            f"input '{spec.name}' {list(spec.shape)} takes no images: expected [N, channels, height, width]"
            " or [N, height, width, channels] with 1 or 3 channels; give arrays (.npz) instead"
        )
    if "scale" not in fields:
        raise DataError(
            f"preprocessing: 'scale' is missing; {1 / 255} turns pixels 0..255 into 0..1 (as ToTensor of"
            " torchvision does), 1 leaves them"
        )
    channels = spec.shape[layout.index("C")] if layout in LAYOUTS else None
    fields.setdefault("colour", "L" if channels == 1 else "RGB")
    for name, count in (("resize", 1), ("center_crop", 2), ("letterbox", 2), ("mean", 1), ("std", 1)):
        if isinstance(fields.get(name), int | float):  # stands for a square, or for all channels
            fields[name] = [fields[name]] * count
    rules = from_plain(ImageRules, fields, "preprocessing", DataError)
    if isinstance(channels, int) and channels != len(rules.colour):
        raise _wrong("colour", rules.colour, f"one of {channels} channels, which input '{spec.name}' has")
    return rules


def _audio_rules(fields: dict[str, Any], spec: TensorSpec) -> AudioRules:
    if "features" not in fields and _audio_length(spec) is None:
        raise DataError(
            f"input '{spec.name}' {list(spec.shape)} takes no sound: expected float [N, samples],"
            " [N, 1, samples] or [N, samples, 1]; state 'features' of the sound, or compute them yourself and"
            " give arrays (.npz)"
        )
    rules = from_plain(AudioRules, {**fields, "channel_axis": None}, "preprocessing", DataError)
    return replace(rules, **_arrange_sound(spec, rules.features, rules.samples))


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
