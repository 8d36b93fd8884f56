"""Runs files of samples through a session, and writes the outputs.

Samples are run in batches of the size that the model accepts. The module does not interpret outputs, except
that it recognises class scores.
"""

import zipfile  # noqa: TID251 - an .npz is data for the user, not a package
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from edgekit_runtime.canonical_json import decode_json
from edgekit_runtime.errors import DataError, PackageError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.preprocessing.images import SUFFIXES
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.sessions.selftest import read_golden_inputs
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.system.atomic_files import write_atomically
from edgekit_runtime.tasks.answerer import Answerer, class_names, open_answerer
from edgekit_runtime.tasks.task import Decoded
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.samples.sequences import SequenceSamples
from edgekit_toolkit.samples.shards import Batching
from edgekit_toolkit.samples.source import open_data

_MAX_PIXELS = 89_000_000  # Pillow's own limit


@dataclass(frozen=True, slots=True)
class Inference:
    """The outputs for a file of samples.

    Attributes:
        batch: The number of samples in one run.
        outputs: A dict from output name to [samples, ...], or to [runs, ...] if the output does not have a
            row for each sample.
        first: The feeds of the first run.
        names: The path of the file of each sample. Empty if one file contains all samples.
    """

    samples: int
    batch: int
    outputs: Mapping[str, NDArray[Any]]
    first: Feeds
    names: tuple[str, ...] = ()


def run_sequences(
    session: Session, manifest: Manifest, path: Path, decoding: Decoding | None = None
) -> Inference:
    """Return the outputs for the sequences at `path`, except states, as [sequences, steps, ...].

    Raises:
        DataError: See `open_data`. Also raised if sequences have different lengths.
        BackendError: The engine failed.
    """
    sequences = SequenceSamples(manifest.states, manifest.inputs, session.outputs, {})
    run = sequences.over_sequences(lambda feeds: [*session.run(feeds).values()], steps="all")
    source = open_data(path, sequences.specs, decoding=decoding)
    parts: dict[str, list[NDArray[Any]]] = {}
    first: Feeds = {}
    for sample, _ in source.stream():
        first = first or sequences.first_step(sample)
        for spec, output in zip(sequences.judged, run(sample), strict=True):
            parts.setdefault(spec.name, []).append(output[np.newaxis])
    outputs = {name: _join(name, rows) for name, rows in parts.items()}
    return Inference(len(source), 1, outputs, first, source.names)


def run_samples(
    session: Session, inputs: Sequence[TensorSpec], path: Path, decoding: Decoding | None = None
) -> Inference:
    """Return the outputs for all samples in the file or folder at `path`.

    A model with a fixed batch runs that many samples at once. The last batch is padded with copies of the
    last sample, whose outputs are discarded. Other models run one sample at a time.

    Raises:
        DataError: See `open_data`. Also raised if the outputs of the samples do not form an array.
        BackendError: The engine failed.
    """
    batching = Batching.of(inputs)
    batch = batching.size or 1
    if batching.stacked:  # samples are read in any number, also fewer than the batch
        inputs = [replace(spec, shape=("samples", *spec.shape[1:])) for spec in inputs]
    source = open_data(path, inputs, decoding=decoding)
    batch = batch if source.batching.stacked else 1
    parts: dict[str, list[NDArray[Any]]] = {}
    first: Feeds = {}
    for feeds, _ in source.stream(batch):
        filled, count = _fill(feeds, batch) if source.batching.stacked else (feeds, 1)
        first = first or filled
        for name, output in session.run(filled).items():
            parts.setdefault(name, []).append(_rows(name, output, count, batch))
    outputs = {name: _join(name, rows) for name, rows in parts.items()}
    return Inference(len(source), batch, outputs, first, source.names)


def run_golden(session: Session, package: OpenedPackage) -> Inference:
    """Return the outputs of a model for the golden inputs of its package.

    Raises:
        DataError: The inputs of the session differ from those of the package.
        BackendError: The engine failed.
    """
    feeds = read_golden_inputs(package)
    shapes = [
        TensorSpec(golden.name, golden.dtype, golden.shape) for golden in package.manifest.golden.inputs
    ]
    batch = Batching.of(shapes).size or 1
    return Inference(batch, batch, session.run(feeds), feeds)


def _fill(feeds: Feeds, batch: int) -> tuple[Feeds, int]:
    """Return feeds of a whole batch, and how many of its samples are real."""
    count = len(next(iter(feeds.values())))
    if count == batch:
        return feeds, count
    return {
        name: np.concatenate([array, np.repeat(array[-1:], batch - count, axis=0)])
        for name, array in feeds.items()
    }, count


def _rows(name: str, output: NDArray[Any], count: int, batch: int) -> NDArray[Any]:
    """Return the part of an output that belongs to the `count` real samples, with a leading axis to join."""
    if output.ndim and output.shape[0] == batch:
        return output[:count]
    if count < batch:
        raise DataError(
            f"output '{name}' has shape {list(output.shape)}, without a row for each of the {batch} samples"
            f" that the model takes at once, so {count} cannot be run; give a multiple of {batch}"
        )
    return output[np.newaxis]


def _join(name: str, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    shapes = sorted({part.shape[1:] for part in parts})
    if len(shapes) > 1:
        raise DataError(
            f"output '{name}' has shape {list(shapes[0])} for one sample and {list(shapes[-1])} for another,"
            " so they form no array; run such samples one at a time"
        )
    return np.concatenate(parts)


def decode_answers(package: OpenedPackage, result: Inference) -> list[Decoded]:
    """Decode the outputs for each sample with the task of a package. Without a task, the list is empty.

    Raises:
        DataError: The task cannot decode these outputs.
        PackageError: The task or the preprocessing is malformed.
    """
    answerer = open_answerer(package)
    if answerer.task is None:
        return []
    return [
        answerer.answer(
            {name: output[index : index + 1] for name, output in result.outputs.items()},
            _find_placement(answerer, package.manifest.inputs, result, index),
        )
        for index in range(result.samples)
    ]


def _find_placement(
    answerer: Answerer, inputs: Sequence[TensorSpec], result: Inference, index: int
) -> Placement | None:
    """Return where the photograph of a sample lies in the input; a picture from an array fills the input."""
    suffix = Path(result.names[index]).suffix.lower() if result.names else ""
    if suffix in SUFFIXES:
        media_type = MediaType(f"image/{suffix.lstrip('.').replace('jpg', 'jpeg')}")
        return answerer.prepare(Path(result.names[index]).read_bytes(), media_type, _MAX_PIXELS).placement
    return Placement.of_input(result.first[inputs[0].name].shape)


def read_class_names(package: OpenedPackage) -> tuple[str, ...]:
    """Return the class names of a package in the order of the classes, or () if it has no labels.

    Raises:
        PackageError: The labels are not UTF-8 text.
    """
    path = package.manifest.labels
    if path is None:
        return ()
    try:
        return class_names(bytes(package.read(path)).decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise PackageError(f"{package.path}: labels '{path}' are not text in UTF-8: {cause}") from cause


def package_decoding(package: OpenedPackage) -> Decoding:
    """Return how the preprocessing of a package converts photographs and recordings to samples.

    Raises:
        PackageError: The preprocessing is not a JSON object.
    """
    path = package.manifest.preprocessing
    if path is None:
        return Decoding(labelled=False)
    where = f"{package.path}: preprocessing '{path}'"
    fields = decode_json(bytes(package.read(path)), where, PackageError)
    in_steps = bool(package.manifest.states) and fields.get("type") == "audio"
    return Decoding(fields, labelled=False, in_steps=in_steps)


def find_top_classes(output: NDArray[Any], classes: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Return the five best classes of each sample as pairs of index and score, best first.

    NaN comes last. The result is empty if the output is not numeric [samples, classes], or `classes` is 0.
    """
    if not classes or output.ndim != 2 or output.shape[1] != classes or output.dtype.kind not in "iuf":
        return ()
    scores = output.astype(np.float64)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :5]
    return tuple(
        tuple((int(index), float(row[index])) for index in best)
        for row, best in zip(scores, order, strict=True)
    )


def write_npz(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays to an `.npz` file atomically. The same arrays give the same bytes.

    `numpy.savez` is not used, because it would take some names as its own arguments (`file`, `allow_pickle`).

    Raises:
        OutputError: The folder is missing or not writable, or the disk is full.
    """
    with write_atomically(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                npy_format.write_array(member, np.asanyarray(array), allow_pickle=False)
