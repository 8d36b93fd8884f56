"""Reads the model of an `edgekit offload` command from an ONNX file or a package, and its samples."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from edgekit_offload.profiling.machine import RunnableGraph
from edgekit_runtime.drift.class_outputs import find_statement
from edgekit_runtime.errors import CutError, DataError, ModelError, PackageError
from edgekit_runtime.package.archive import OpenedPackage, read_package
from edgekit_runtime.sessions.selftest import read_golden, read_golden_inputs
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.tensors import DTYPES, Array, TensorSpec
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.evaluation.batch_inference import package_decoding
from edgekit_toolkit.importers.external import external_files, merge_external
from edgekit_toolkit.importers.file_kind import describe_no_model
from edgekit_toolkit.importers.model_file import MAX_MODEL_BYTES, errors_with_path
from edgekit_toolkit.importers.onnx import check_inference
from edgekit_toolkit.onnx_graph.specs import tensor_specs
from edgekit_toolkit.openings.model_opening import check_opening
from edgekit_toolkit.samples.generated import generate_feeds
from edgekit_toolkit.samples.source import draw_mask, open_data

_PACKAGE_SUFFIX = ".edgepkg"
_BACKENDS = ("offload", "ort")
_GENERATED = 8  # samples, where none were given
MAX_SAMPLES = 400


class NamedModel(NamedTuple):
    name: str
    graph: RunnableGraph
    classes: frozenset[str] = frozenset()  # outputs that the package states to hold class scores
    sample_rate_hz: float | None = None  # of sound, if the package states how it is preprocessed


def read_named_model(path: Path) -> NamedModel:
    """Read an ONNX model, or the default model of a package with its session options.

    Raises:
        ModelError: The file is not an ONNX model, or its external data are missing or invalid.
        PackageError: The package cannot be used. The subclass says why.
        CutError: The package does not run in onnxruntime.
    """
    if path.suffix == _PACKAGE_SUFFIX:
        return _read_packed(path)
    return NamedModel(path.stem, _read_with_weights(path))


def read_whole_model(path: Path) -> NamedModel:
    """Read a model with all its weights, or the default model of a package with its session options.

    Raises:
        ModelError: The file is missing or not an ONNX model, or the model is too large for one file.
        PackageError: The package is not trusted, or does not contain an ONNX model with its weights.
    """
    hint = "make an ONNX package of it by `edgekit package MODEL --backend ort`, and plan that"
    if path.suffix == ".tflite":
        raise ModelError(f"{path}: heads and tails of plans are made of ONNX models; {hint}")
    if path.suffix != _PACKAGE_SUFFIX:
        graph = _read_with_weights(path)
        if graph.weights:
            total_bytes = len(graph.content) + sum(map(len, graph.weights.values()))
            raise ModelError(
                f"{path}: has {total_bytes / 1e9:.1f} GB with its external data; packages, heads and tails"
                f" have {MAX_MODEL_BYTES / 1e9:g} GB at most, so no plan can carry it. `edgekit offload"
                " profile` measures it; plan a form of it with smaller weights, such as float16 or int8"
            )
        return NamedModel(path.stem, graph)
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        backend = package.manifest.backend
        if not backend.artifact.endswith(".onnx"):
            raise PackageError(
                f"{path}: its model '{backend.artifact}' is not ONNX; heads and tails are made of ONNX, also"
                f" those that upload the whole input; {hint}"
            )
        options = next((choice.options for choice in backend.chain if choice.name in _BACKENDS), {})
        if options.get("weights"):
            raise PackageError(
                f"{path}: its model keeps weights in '{options['weights']}', and submodels can name only"
                " the model's own file; package the model again by `edgekit package MODEL --backend ort`"
            )
        graph = RunnableGraph(bytes(package.read(backend.artifact)), options)
        first = package.manifest.outputs[0].name
        is_stated = find_statement(package.manifest.figures, first) is not None
        classes = frozenset({first} if is_stated else ())
        return NamedModel(package.manifest.name, graph, classes, _read_sample_rate(package))


def _read_sample_rate(package: OpenedPackage) -> float | None:
    """Return the sample rate in Hz from the preprocessing of a package, or None."""
    fields = package_decoding(package).preprocessing or {}
    rate_hz = fields.get("sample_rate")
    return float(rate_hz) if isinstance(rate_hz, int | float) else None


def _read_with_weights(path: Path) -> RunnableGraph:
    """Read an ONNX file with its external data, as one model unless that would be too large."""
    model, content = _read_onnx(path)
    files = external_files(model, path)
    total_bytes = len(content) + sum(file.stat().st_size for file in files.values())
    if total_bytes > MAX_MODEL_BYTES:
        weights = {location: file.read_bytes() for location, file in files.items()}
        return RunnableGraph(content, weights=weights)
    merge_external(model, files, MAX_MODEL_BYTES)
    whole = model.SerializeToString(deterministic=True) if files else content
    with errors_with_path(path):
        check_inference(whole)
    check_opening("ort", whole, {})
    return RunnableGraph(whole)


def _read_onnx(path: Path) -> tuple[onnx.ModelProto, bytes]:
    try:
        content = path.read_bytes()
    except OSError as cause:
        raise ModelError(f"{path}: {cause.strerror}; check the path") from cause
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as cause:
        raise ModelError(f"{path}: is {describe_no_model(path, content)}") from cause
    if not model.graph.node:
        raise ModelError(f"{path}: is {describe_no_model(path, content)}")
    return model, content


def _read_packed(path: Path) -> NamedModel:
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        for choice in package.manifest.backend.chain:
            if choice.name in _BACKENDS:
                options = {name: value for name, value in choice.options.items() if name != "weights"}
                location = choice.options.get("weights")
                weights = {str(location): bytes(package.read(str(location)))} if location else {}
                content = bytes(package.read(choice.artifact))
                graph = RunnableGraph(content, options, weights, _one_request(package))
                return NamedModel(package.manifest.name, graph)
    raise CutError(
        f"{path}: has no backend for onnxruntime, and only that can be split; package it for 'ort'"
    )


def read_samples(
    model: Path,
    content: bytes,
    path: Path | None,
    at_most: int = MAX_SAMPLES,
    least: int = MAX_SAMPLES,
    *,
    max_bytes: float = 1e9,
) -> tuple[list[dict[str, Array]], tuple[str, ...]]:
    """Return samples with a batch size of 1 in a reproducible random order, and notes for the user.

    If `path` is None, the only sample consists of the golden inputs of the package. Without golden inputs, a
    few samples are generated.

    Args:
        model: The path of the model or package.
        content: The ONNX model in that file.
        path: The path of the samples, or None.
        at_most: The maximum number of samples.
        least: The minimum number of samples, even if they exceed `max_bytes`.
        max_bytes: The maximum size of all samples.

    Raises:
        DataError: The samples cannot be read, or none can be generated.
    """
    specs, _ = tensor_specs(onnx.load_from_string(content))
    decoding, golden = None, None
    if model.suffix == ".edgepkg":
        with read_package(model, TrustStore.from_folder(find_keys_folder())) as package:
            decoding = package_decoding(package)
            golden = dict(read_golden(package).inputs)
    if path is None:
        try:
            samples = [golden] if golden else generate_feeds(specs, _GENERATED, 0)
        except DataError as cause:
            reason = str(cause).partition(";")[0]
            raise DataError(f"{model}: {reason}; give --samples, which have a size") from cause
        origin = "the golden inputs of the package" if golden else "generated inputs"
        note = (
            f"Sizes were measured on {origin}: bytes of compressed tensors are not those of real data, codecs"
            " that suit these may be missing, and what a coding changes in the answers is unknown. Give"
            " --samples."
        )
        return [dict(sample) for sample in samples], (note,)
    source = open_data(path, specs, decoding=decoding)
    fitting = int(max_bytes / sum(_one_row_bytes(spec) for spec in specs))
    at_most = max(min(at_most, fitting), least)
    if len(source) > at_most:  # spread over all: files are often sorted by class
        source = source.selected(draw_mask(len(source), at_most / len(source), seed=0))
    samples = [dict(feeds) for feeds, _ in source.stream(1)]
    order = np.random.default_rng(0).permutation(len(samples))  # the first few represent all
    return [samples[index] for index in order], source.warnings


def _one_row_bytes(spec: TensorSpec) -> int:
    """Return the size of one sample in bytes, where dynamic dimensions count as 1."""
    sizes = [size for size in spec.shape if isinstance(size, int)]
    return math.prod(sizes) * DTYPES[spec.dtype].itemsize


def _one_request(package: OpenedPackage) -> dict[str, Array]:
    """Return one row of the golden inputs. Generated inputs may have sizes that the model cannot process."""
    free = {spec.name for spec in package.manifest.inputs if isinstance(next(iter(spec.shape), 1), str)}
    golden = read_golden_inputs(package)
    return {name: array[:1] if name in free else array for name, array in golden.items()}
