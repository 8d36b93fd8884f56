"""Streams samples for a model, with or without labels, from arrays, images or sound recordings.

Memory does not grow with the number of samples. Arrays must have the dtype and shape of the model's input.
Errors say how to convert them. Images and recordings are preprocessed.

The layouts of array files are described in `shards`, the others in `media`.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.samples.media.decoding import Decoding, media_shard
from edgekit_toolkit.samples.media.files import is_media
from edgekit_toolkit.samples.selection import Weights
from edgekit_toolkit.samples.shards import Batching, Shard, find_shards
from edgekit_toolkit.samples.truth import Truth, truth_array

# Labels are int64 [batch], or objects [batch] of a record of `truth`.
Batch = tuple[Feeds, NDArray[Any] | None]
_MAX_LABEL: Final = 2**63 - 1

Sample = tuple[dict[str, NDArray[Any]], Truth | None]


class DataSource:
    """Samples for a model, in the order of the files. Use `open_data` to create one.

    If the model fixes its batch size, samples are grouped into batches of this size. An incomplete last batch
    is left out with a warning.
    """

    def __init__(
        self, inputs: Sequence[TensorSpec], shards: Sequence[Shard], keep: NDArray[np.bool_]
    ) -> None:
        """Choose the samples of `shards` where `keep` (bool [samples on disk]) holds.

        Raises:
            DataError: there are fewer samples than the model takes at once.
        """
        self.inputs = tuple(inputs)
        self.in_front = shards[0].in_front
        self.batching = Batching.of(inputs, in_front=self.in_front)
        self.labelled = all(shard.labels is not None for shard in shards)
        self.truth = shards[0].truth
        self._shards = tuple(shards)
        group = self.batching.size or 1
        rows = np.flatnonzero(keep)
        self._left_out = len(rows) % group
        if len(rows) < group:
            raise DataError(
                f"there are {len(rows)} samples, and the model takes {group} at once; add samples"
            )
        self._keep = keep.copy()
        self._keep[rows[len(rows) - self._left_out :]] = False

    def __len__(self) -> int:
        """Return the number of samples that `stream` yields."""
        return int(np.count_nonzero(self._keep))

    @property
    def warnings(self) -> tuple[str, ...]:
        notes = [note for shard in self._shards for note in shard.notes]
        if len(self) == 1:
            notes.append("there is 1 sample: ranges and accuracy from it say little; 100 or more are usual")
        if self._left_out:
            notes.append(
                f"the last {self._left_out} samples are left out: the model takes exactly"
                f" {self.batching.size} at once"
            )
        return tuple(notes)

    @property
    def names(self) -> tuple[str, ...]:
        """The path of each sample's file, empty unless each sample has its own file."""
        names = [name for shard in self._shards for name in shard.names]
        return tuple(itertools.compress(names, self._keep))

    @property
    def probabilities(self) -> Weights | None:
        """The probability with which each sample was selected in the field, float64 [samples].

        It is NaN for samples that are not from the field. The array is None if there is no `selection.csv`.
        """
        if all(shard.probabilities is None for shard in self._shards):
            return None
        rows = [
            np.full(len(shard), np.nan) if shard.probabilities is None else shard.probabilities
            for shard in self._shards
        ]
        return np.asarray(np.concatenate(rows)[self._keep])

    def stream(self, batch: int = 1) -> Iterator[Batch]:
        """Read the files, and yield feeds and their labels in order. The labels are [batch], or None.

        Args:
            batch: The number of samples per feed, ignored if the model fixes its batch size. A feed has
                fewer samples if it is the last feed, or if the next sample has a different shape.

        Raises:
            DataError: A file is damaged, a value is NaN or infinite, or a label is negative. The message
                names the sample. It is also raised if samples in a batch of fixed size differ in shape.
        """
        size = self.batching.size or batch
        if size < 1:
            raise DataError(f"a batch of {size} was asked for, expected at least 1")
        group: list[Sample] = []
        for sample in self._samples():
            if group and (len(group) == size or _shapes(group[0]) != _shapes(sample)):
                yield self._joined(group, size)
                group = []
            group.append(sample)
        if group:
            yield self._joined(group, size)

    def digests(self) -> Iterator[tuple[bytes, str]]:
        """Yield the SHA-256 of each sample's inputs (32 bytes) and its label as text."""
        for arrays, label in self._samples():
            yield _digest(arrays), str(label)

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the digests and labels of all samples, in hexadecimal. All files are read once."""
        total = hashlib.sha256()
        for digest, label in self.digests():
            total.update(digest + f"{label};".encode())
        return total.hexdigest()

    def selected(self, chosen: NDArray[np.bool_]) -> "DataSource":
        """Return a view of the samples for which `chosen` (bool [len(self)]) is True.

        Raises:
            DataError: The number of chosen samples is below the model's batch size.
        """
        keep = self._keep.copy()
        keep[np.flatnonzero(self._keep)[~chosen]] = False
        return DataSource(self.inputs, self._shards, keep)

    def _samples(self) -> Iterator[Sample]:
        start = 0
        for shard in self._shards:
            keep = self._keep[start : start + len(shard)]
            start += len(shard)
            columns = [column.rows(keep) for column in shard.inputs.values()]
            labels = shard.labels.rows(keep) if shard.labels is not None else None
            rows = zip(*columns, strict=True)
            for position, row in zip(np.flatnonzero(keep).tolist(), rows, strict=True):
                label = None if labels is None else next(labels)
                label = int(label) if isinstance(label, (np.ndarray, np.integer)) else label
                arrays = dict(zip(shard.inputs, row, strict=True))
                _check_values(arrays, label, _where(shard, position))
                yield arrays, label

    def _joined(self, group: Sequence[Sample], size: int) -> Batch:
        if self.batching.size is not None and len(group) != size:
            raise DataError(
                f"samples of different shapes cannot share a batch of {size}, which the model fixes;"
                " make all samples the same shape"
            )
        feeds = {}
        for spec in self.inputs:
            rows = [arrays[spec.name] for arrays, _ in group]
            feeds[spec.name] = np.stack(rows) if self.batching.stacked else rows[0].copy()
        labels = [label for _, label in group if label is not None]
        return feeds, truth_array(labels) if self.labelled else None


def open_data(
    path: Path,
    inputs: Sequence[TensorSpec],
    *,
    decoding: Decoding | None = None,
) -> DataSource:
    """Return the samples under `path` for a model. Their values are read by `stream`.

    Args:
        path: An `.npz` or `.npy` file, an image, a recording, a list of labelled files, or a folder.
        inputs: The inputs of the model.
        decoding: The settings for images and recordings.

    Raises:
        DataError: A file is missing, empty, truncated or corrupt, an array contains Python objects or has a
            wrong name, dtype or shape, arrays or labels differ in length, or labels are not integers. For
            images and recordings, see also `media_shard`.
    """
    if is_media(path):
        shards = [media_shard(path, inputs, decoding or Decoding())]
    else:
        shards = find_shards(path, inputs)
    total = sum(len(shard) for shard in shards)
    return DataSource(inputs, shards, np.ones(total, np.bool_))


def split(source: DataSource, fraction: float, seed: int) -> tuple[DataSource, DataSource]:
    """Split samples at random into two disjoint views. The first view gets about `fraction` of them.

    The result depends only on the number of samples and the seed, not on the numpy version.

    Raises:
        DataError: `fraction` is not between 0 and 1, or a view has fewer samples than the model's batch size.
    """
    if not 0 < fraction < 1:
        raise DataError(f"a split takes a fraction between 0 and 1, got {fraction}")
    chosen = draw_mask(len(source), fraction, seed)
    return source.selected(chosen), source.selected(~chosen)


def _where(shard: Shard, position: int) -> str:
    if shard.names:
        return shard.names[position]
    return f"{next(iter(shard.inputs.values())).path}: sample {position}"


def draw_mask(count: int, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return a bool mask [count] with `round(fraction * count)` random positions set to True.

    The result is the same for the same arguments.
    """
    keys = np.random.PCG64(seed).random_raw(count)
    chosen = np.zeros(count, np.bool_)
    chosen[np.argsort(keys, kind="stable")[: round(fraction * count)]] = True
    return chosen


def _digest(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    digest = hashlib.sha256()
    for name, array in arrays.items():
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{name}\0{array.dtype.name}\0{array.shape}\0".encode() + little.tobytes())
    return digest.digest()


def _shapes(sample: Sample) -> list[tuple[int, ...]]:
    return [array.shape for array in sample[0].values()]


def _check_values(arrays: Mapping[str, NDArray[Any]], label: Truth | None, where: str) -> None:
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = int(np.count_nonzero(~np.isfinite(array)))
            raise DataError(
                f"{where}: {bad} values of '{name}' are NaN or infinite; remove the sample or repair it"
            )
    if isinstance(label, int) and not 0 <= label <= _MAX_LABEL:
        raise DataError(f"{where}: label is {label}, expected a class number of 0 to {_MAX_LABEL}")
