"""Exports a package as files for an Android app, with Kotlin code that prepares inputs and decodes outputs.

    app/build.gradle.kts                             dependencies, to be merged with those of the app
    app/src/main/assets/edgekit/                     model.tflite, labels.txt, golden tensors
    app/src/main/java/edgekit/                       Kotlin code
    app/src/androidTest/java/edgekit/GoldenTest.kt   the self-test of the package, as a test on a phone

`Exported.kt` is generated for each package. The other Kotlin files are copied from the folder `android`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.golden import GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.preprocessing.audio import AudioRules
from edgekit_runtime.preprocessing.images import ImageRules
from edgekit_runtime.preprocessing.rules import MediaRules
from edgekit_runtime.sessions.selftest import find_answerer
from edgekit_runtime.system.engines import find_engine
from edgekit_runtime.tasks.answerer import Answerer
from edgekit_runtime.tasks.task import read_task
from edgekit_runtime.tensors import Array

_SOURCES: Final = Path(__file__).parent / "android"
_MAIN: Final = "app/src/main/java/edgekit"
_ASSETS: Final = "edgekit"
_DTYPES: Final = frozenset({"float32", "int8", "uint8", "int32", "int64"})
_MEDIA_DTYPES: Final = frozenset({"float32", "int8", "uint8"})
# By layout of detections: whether rows have an object score, and whether boxes are offsets from cells.
_LAYOUTS: Final = {"scored": (False, False), "objectness": (True, False), "grid": (True, True)}


def list_android_files(package: OpenedPackage) -> dict[str, bytes]:
    """Return the contents of the files of the Android project, by path.

    Raises:
        ConfigError: The package has no LiteRT variant, or a tensor has a free dimension or an unsupported
            dtype.
    """
    package = _select_litert(package)
    manifest = package.manifest
    for spec in (*manifest.inputs, *manifest.outputs):
        if spec.size_bytes is None or spec.dtype not in _DTYPES:
            raise ConfigError(
                f"{package.path}: '{spec.name}' is {spec.dtype} {list(spec.shape)}; the app needs sizes and"
                f" {', '.join(sorted(_DTYPES))}: package it with --batch 1 or fixed shapes"
            )
    answerer = find_answerer(package)
    exported = "\n".join(_write_exported(package, answerer))
    files = {
        "app/build.gradle.kts": (_SOURCES / "build.gradle.kts").read_bytes(),
        f"{_MAIN}/Exported.kt": exported.encode(),
        "app/src/androidTest/java/edgekit/GoldenTest.kt": (_SOURCES / "GoldenTest.kt").read_bytes(),
        **{f"{_MAIN}/{path.name}": path.read_bytes() for path in sorted(_SOURCES.glob("*s.kt"))},
        f"{_MAIN}/Sound.kt": (_SOURCES / "Sound.kt").read_bytes(),
        f"{_MAIN}/Model.kt": (_SOURCES / "Model.kt").read_bytes(),
    }
    labels = "".join(f"{label}\n" for label in (answerer.labels if answerer else ()))
    assets = {"model.tflite": bytes(package.read(manifest.backend.artifact)), "labels.txt": labels.encode()}
    tensors: list[GoldenInput | GoldenOutput] = [*manifest.golden.inputs, *manifest.golden.outputs]
    for tensor in tensors:
        assets[_golden_name(manifest, tensor.name)] = _as_floats(tensor.decode(package.read(tensor.path)))
    return files | {f"app/src/main/assets/{_ASSETS}/{name}": content for name, content in assets.items()}


def _select_litert(package: OpenedPackage) -> OpenedPackage:
    """Return the package with the first variant that LiteRT runs as its only one."""
    for variant in package.manifest.all_variants:
        if find_engine(variant.backend.name).file_format == "tflite":
            return package.select(variant.name)
    raise ConfigError(
        f"{package.path}: has no LiteRT model; package it with --target android or --backend litert"
    )


def _golden_name(manifest: Manifest, tensor: str) -> str:
    names = [spec.name for spec in (*manifest.inputs, *manifest.outputs)]
    return f"golden-{names.index(tensor)}.bin"


def _as_floats(values: Array) -> bytes:
    floats = values.astype("<f4")
    if not np.array_equal(floats.astype(values.dtype), values):
        raise ConfigError("a golden tensor holds whole numbers over 16777216, which float32 cannot hold")
    return floats.tobytes()


def _write_exported(package: OpenedPackage, answerer: Answerer | None) -> Iterator[str]:
    """Yield the lines of Exported.kt."""
    manifest = package.manifest
    yield "package edgekit"
    yield ""
    yield f"/** {manifest.name} {manifest.version}, written by `edgekit export --format android`. */"
    yield "object Exported {"
    yield f"    const val MODEL = {_kotlin(f'{_ASSETS}/model.tflite')}"
    yield f"    const val LABELS = {_kotlin(f'{_ASSETS}/labels.txt')}"
    for title, tensors in (("INPUTS", manifest.golden.inputs), ("OUTPUTS", manifest.golden.outputs)):
        yield ""
        yield f"    val {title} = listOf("
        rows = []
        for tensor in tensors:
            asset = f"{_ASSETS}/{_golden_name(manifest, tensor.name)}"
            values = [_kotlin(tensor.name), _array(tensor.shape), _kotlin(asset)]
            values.append(_kotlin(getattr(tensor, "every", 1)))
            values += [f"{_kotlin(getattr(tensor, bound, 0.0))}f" for bound in ("atol", "rtol")]
            rows.append(f"        ExportedTensor({', '.join(values)})")
        yield ",\n".join(rows)
        yield "    )"
    if answerer is not None and answerer.rules is not None:
        name = "PICTURE" if isinstance(answerer.rules, ImageRules) else "SOUND"
        yield from write_rules(name, answerer.rules)
    if manifest.task is not None:
        outputs = manifest.golden.outputs
        yield from write_task(
            manifest.task, [output.name for output in outputs], [output.shape for output in outputs]
        )
    yield "}"
    yield ""


def write_rules(name: str, rules: MediaRules) -> Iterator[str]:
    """Yield lines of Kotlin that define the preprocessing as the constant `name`.

    Yield nothing if the Kotlin code does not support the dtype, or if `rules` split sounds into steps.
    """
    if rules.dtype not in _MEDIA_DTYPES:
        return
    if isinstance(rules, ImageRules):
        yield from _construct(name, "PictureRules", _picture_arguments(rules))
    elif rules.hop is None:
        yield from _construct(name, "SoundRules", _sound_arguments(rules))


def write_task(choice: TaskChoice, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield lines of Kotlin that define a task and decode its answer.

    Yield nothing if the Kotlin code does not support the task. `names` and `shapes` describe the outputs of
    the model.
    """
    task, options = read_task(choice)
    output = names.index(options.output) if getattr(options, "output", "") in names else 0
    if task.name == "classification":
        yield from _construct(
            "TASK",
            "ClassificationRules",
            {
                "scores": f"Scores.{options.scores.upper()}",
                "top": _kotlin(options.top),
                "minScore": f"{_kotlin(options.min_score)}f",
                "background": _kotlin(options.background),
            },
        )
        yield ""
        yield "    /** Returns the best classes for the outputs of [Model.run]. */"
        yield "    fun answer(outputs: List<FloatArray>, labels: List<String>) ="
        yield f"        TASK.answer(outputs[{output}], labels)"
    if task.name == "detection" and options.layout in _LAYOUTS:
        has_objects, has_cells = _LAYOUTS[options.layout]
        yield from _construct(
            "TASK",
            "DetectionRules",
            {
                "hasObjects": _kotlin(has_objects),
                "strides": _array(options.strides if has_cells else ()),
                "boxes": _kotlin(options.boxes),
                "inShares": _kotlin(options.unit == "shares"),
                "scores": f"Scores.{options.scores.upper()}",
                "background": _kotlin(options.background),
                "minScore": f"{_kotlin(options.min_score)}f",
                "overlap": f"{_kotlin(options.overlap)}f",
                "maxBoxes": _kotlin(options.max_boxes),
            },
        )
        rows, columns = shapes[output][-2:]
        yield ""
        yield "    /** Returns the boxes for the outputs of [Model.run], the best first. */"
        yield "    fun answer(outputs: List<FloatArray>, labels: List<String>, placement: Placement) ="
        yield f"        TASK.answer(outputs[{output}], {rows}, {columns}, labels, placement)"


def _picture_arguments(rules: ImageRules) -> dict[str, str]:
    return {
        "resize": "null" if rules.resize is None else _array(rules.resize),
        "filter": f"Filter.{rules.interpolation.upper()}",
        "centerCrop": "null" if rules.center_crop is None else _array(rules.center_crop),
        "letterbox": "null" if rules.letterbox is None else _array(rules.letterbox),
        "fill": _kotlin(rules.fill),
        "isCentred": _kotlin(rules.align == "centre"),
        "colour": _kotlin(rules.colour),
        "scale": _kotlin(float(rules.scale)),
        "mean": _array(rules.mean, "double"),
        "std": _array(rules.std, "double"),
        "channelsFirst": _kotlin(rules.layout == "NCHW"),
        "isInteger": _kotlin(rules.dtype != "float32"),
    }


def _sound_arguments(rules: AudioRules) -> dict[str, str]:
    features = "null"
    if rules.features is not None:
        kind = rules.features
        values = (
            kind.kind == "mfcc",
            kind.frame,
            kind.hop,
            kind.mel_bins,
            float(kind.low_hz),
            float(kind.high_hz),
            kind.coefficients,
            kind.power,
            float(kind.floor),
        )
        features = f"FeatureRules({', '.join(map(_kotlin, values))})"
    return {
        "sampleRate": _kotlin(rules.sample_rate),
        "samples": "null" if rules.samples is None else _kotlin(rules.samples),
        "features": features,
        "scale": _kotlin(float(rules.scale)),
        "mean": _kotlin(float(rules.mean)),
        "std": _kotlin(float(rules.std)),
        "isTransposed": _kotlin(rules.is_transposed),
        "isInteger": _kotlin(rules.dtype != "float32"),
    }


def _construct(name: str, kind: str, arguments: Mapping[str, str]) -> Iterator[str]:
    yield ""
    yield f"    val {name} = {kind}("
    yield ",\n".join(f"        {argument} = {value}" for argument, value in arguments.items())
    yield "    )"


def _kotlin(value: Any) -> str:
    """Return a literal of Kotlin; those of numbers and booleans are JSON's."""
    return json.dumps(value).replace("$", "\\$")


def _array(values: Any, kind: str = "int") -> str:
    convert = float if kind == "double" else int
    return f"{kind}ArrayOf({', '.join(_kotlin(convert(value)) for value in values)})"
