"""Finds files of arrays and assigns the arrays to inputs.

These layouts are supported:

    - An `.npz` with an array [N, ...] for each input, under the name of the input. A single input may be
      called `x`. The optional array `y` [N] contains the labels.
    - A `.npy`, if the model has one input.
    - A folder of such files. Each contains N samples, or one sample without the N axis.
    - A folder of `.npy` files that are named after the inputs.

Arrays with other names are rejected, because they might be labels under a wrong name. For every model, arrays
may have an additional first axis for the samples, [N, *shape of the input]. The model then runs once for each
sample. This axis is required if the inputs do not share a leading batch axis, as for a scalar or a state.
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.tensors import DTYPES, TensorSpec
from edgekit_toolkit.onnx_graph.specs import batch_dims
from edgekit_toolkit.samples.npy import StoredArray, read_npy, read_npz
from edgekit_toolkit.samples.selection import Weights, find_probabilities
from edgekit_toolkit.samples.truth import Truth

LABELS: Final = "y"
ONLY_INPUT: Final = "x"
# Other names for labels, in lower case.
_LABEL_NAMES: Final = frozenset(
    {"y", "label", "labels", "target", "targets", "class", "classes", "y_true", "ground_truth", "gt"}
)

_MAX_SAMPLE_BYTES: Final = 1 << 30  # of one input

Arrays = Mapping[str, StoredArray]


class Column(Protocol):
    """The rows of one input or of the labels, from any type of file."""

    @property
    def path(self) -> Path:
        """The path of the file or folder that contains the rows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows, followed by the shape of a row if all rows have the same shape."""

    def rows(self, keep: NDArray[np.bool_] | None = None) -> Iterator[NDArray[Any]]:
        """Yield the rows for which `keep` (bool [rows]) is True, or all rows by default."""


class TruthColumn(Protocol):
    """The ground truth of each row, such as its boxes or mask."""

    def rows(self, keep: NDArray[np.bool_] | None = None) -> Iterator[Truth]:
        """Yield the ground truth of the rows for which `keep` (bool [rows]) is True, or of all by default."""


@dataclass(frozen=True, slots=True)
class Batching:
    """How samples are combined into feeds.

    Attributes:
        stacked: Whether samples are stacked along a leading batch axis that all inputs share. If False, each
            feed is a single sample.
        size: The number of samples in a feed if the model fixes it, or None if the caller can choose it.
    """

    stacked: bool
    size: int | None

    @classmethod
    def of(cls, inputs: Sequence[TensorSpec], *, in_front: bool = False) -> "Batching":
        """Return the batching for a model with these inputs.

        For `in_front`, see `Shard`.
        """
        leading = {spec.shape[0] if spec.shape else None for spec in inputs}
        if not in_front and leading <= set(batch_dims(inputs)):
            return cls(stacked=True, size=None)
        size = leading.pop() if len(leading) == 1 else None
        if not in_front and isinstance(size, int) and size > 0:
            return cls(stacked=True, size=size)
        return cls(stacked=False, size=1)


@dataclass(frozen=True, slots=True)
class Shard:
    """The samples of one file or folder: the rows of each input, and the labels.

    Attributes:
        labels: The label of each row, or None without labels.
        truth: The type of the labels: `int` for class numbers, or a class of the module `truth`.
        names: The path of each row's file, empty unless each row has its own file.
        in_front: Whether samples have an additional axis in front of the axes of the inputs.
        probabilities: The probability with which each row was selected (see `selection`), or None.
    """

    inputs: Mapping[str, Column]
    labels: Column | TruthColumn | None
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    in_front: bool = False
    truth: type[Truth] = int
    probabilities: Weights | None = None

    def __len__(self) -> int:
        return next(iter(self.inputs.values())).shape[0]


def find_shards(path: Path, inputs: Sequence[TensorSpec]) -> list[Shard]:
    """Return one shard for each file under `path`, sorted.

    A folder of `.npy` files that are named after inputs is one shard.

    Raises:
        DataError: The files cannot be used, see `source.open_data`.
    """
    shards = [
        _with_probabilities(_shard(arrays, names, where, inputs), where)
        for where, arrays, names in _found(path, inputs)
    ]
    if len({shard.labels is None for shard in shards}) > 1:
        raise DataError(f"{path}: some files have labels '{LABELS}' and some have none; add or remove them")
    if len({shard.in_front for shard in shards}) > 1:
        raise DataError(f"{path}: some files have an axis for samples in front and some have none")
    return shards


def _with_probabilities(shard: Shard, where: Path) -> Shard:
    """Return the shard with the probability of its file for each of its rows, if a list names it."""
    if where.is_dir():
        return shard
    return replace(shard, probabilities=find_probabilities(where.parent, [where.name] * len(shard)))


def _found(path: Path, inputs: Sequence[TensorSpec]) -> Iterator[tuple[Path, Arrays, Sequence[str]]]:
    """Yield each file (or folder with an array for each input), its arrays, and all names in it."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    names = _wanted(inputs)
    if not path.is_dir():
        yield path, *_read(path, names, inputs)
        return
    files = sorted(file for file in path.iterdir() if file.suffix in (".npy", ".npz") and file.is_file())
    if not files:
        raise DataError(f"{path}: the folder holds no .npz or .npy file, no image and no recording")
    named = {file.stem: file for file in files if file.suffix == ".npy" and file.stem in names}
    if named.keys() - {LABELS}:
        _check_names(path, [file.stem for file in files], names, inputs)
        yield path, {name: read_npy(file) for name, file in named.items()}, list(named)
        return
    for file in files:
        yield file, *_read(file, names, inputs)


def _wanted(inputs: Sequence[TensorSpec]) -> frozenset[str]:
    """Return the names that an array may have."""
    only = {ONLY_INPUT} if len(inputs) == 1 else set()
    return frozenset({spec.name for spec in inputs} | {LABELS} | only)


def _check_names(
    where: Path, names: Sequence[str], needed: frozenset[str], inputs: Sequence[TensorSpec]
) -> None:
    """Refuse arrays that nothing would read.

    Raises:
        DataError: there are such arrays.
    """
    unknown = [name for name in names if name not in needed]
    if not unknown:
        return
    expected = ", ".join(f"'{spec.name}'" for spec in inputs)
    also = f" (or '{ONLY_INPUT}')" if len(inputs) == 1 and inputs[0].name != ONLY_INPUT else ""
    labels = [] if LABELS in names else [name for name in unknown if name.lower() in _LABEL_NAMES]
    hint = f"rename '{labels[0]}' to '{LABELS}' if it holds the labels" if labels else "remove them"
    raise DataError(
        f"{where}: has arrays that no input takes: {', '.join(map(repr, unknown))}; expected"
        f" {expected}{also}, and '{LABELS}' for labels; {hint}"
    )


def _read(file: Path, needed: frozenset[str], inputs: Sequence[TensorSpec]) -> tuple[Arrays, Sequence[str]]:
    if file.suffix == ".npz":
        return read_npz(file, needed)
    if file.suffix != ".npy":
        raise DataError(f"{file}: expected an .npz or .npy file, or a folder of them")
    if len(inputs) != 1:
        names = ", ".join(spec.name for spec in inputs)
        raise DataError(f"{file}: holds one array, but the model has inputs {names}; save an .npz with these")
    return {inputs[0].name: read_npy(file)}, [inputs[0].name]


def _shard(arrays: Arrays, names: Sequence[str], where: Path, inputs: Sequence[TensorSpec]) -> Shard:
    needed = _wanted(inputs)
    columns = {}
    for spec in inputs:
        name = ONLY_INPUT if len(inputs) == 1 and spec.name not in arrays else spec.name
        if name not in arrays:
            raise DataError(_missing(where, spec.name, names, inputs))
        columns[spec.name] = arrays[name]
    _check_names(where, names, needed, inputs)
    labels = None if LABELS in columns else arrays.get(LABELS)
    batching = Batching.of(inputs)
    axes = {len(columns[spec.name].shape) - len(spec.shape) for spec in inputs}
    shapes = {name: list(stored.shape) for name, stored in columns.items()}
    if axes == {-1 if batching.stacked else 0}:
        columns = {name: _one_row(stored) for name, stored in columns.items()}
        labels = _one_row(labels) if labels is not None and labels.shape == () else labels
    in_front = axes == {1} or not batching.stacked
    for spec in inputs:
        _check_column(columns[spec.name], spec, in_front=in_front, stated=shapes[spec.name])
    _check_lengths([*columns.values(), *([labels] if labels is not None else [])], labels)
    if not any(math.prod(stored.shape[1:]) for stored in columns.values()):
        raise DataError(f"{where}: its samples have no values, but inputs {_shapes(columns)}")
    return Shard(columns, labels, in_front=in_front)


def _shapes(columns: Mapping[str, StoredArray]) -> str:
    return ", ".join(f"'{name}' {list(stored.shape[1:])}" for name, stored in columns.items())


def _one_row(stored: StoredArray) -> StoredArray:
    return replace(stored, shape=(1, *stored.shape))


def _missing(where: Path, name: str, names: Sequence[str], inputs: Sequence[TensorSpec]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; rename '{near[0]}'" if near else ""
    also = f" (or '{ONLY_INPUT}')" if len(inputs) == 1 and inputs[0].name != ONLY_INPUT else ""
    listed = ", ".join(names) or "no arrays"
    return f"{where}: has no array '{name}'{also}, got {listed}; the model takes one array an input{hint}"


def _check_column(stored: StoredArray, spec: TensorSpec, *, in_front: bool, stated: Sequence[int]) -> None:
    sample = spec.shape if in_front else spec.shape[1:]
    expected = DTYPES[spec.dtype]
    if stored.dtype.newbyteorder("=") != expected:
        raise DataError(
            f"{stored.where}: has dtype {stored.dtype.name}, but input '{spec.name}' takes {spec.dtype};"
            f" apply the model's preprocessing and save the result .astype('{spec.dtype}')"
        )
    row = stored.shape[1:]
    fits = len(row) == len(sample) and all(
        size == want or isinstance(want, str) for size, want in zip(row, sample, strict=True)
    )
    if not stored.shape or not fits:
        forms = [", ".join(map(str, ("N", *axes))) for axes in dict.fromkeys((sample, spec.shape))]
        is_other_form = not in_front and len(row) == len(spec.shape)
        hint = ", all inputs the same of the two" if is_other_form else _layout_hint(row, sample)
        raise DataError(
            f"{stored.where}: has shape {stated}, but input '{spec.name}' takes"
            f" [{'] or ['.join(forms)}] with N samples{hint}"
        )
    if stored.row_bytes > _MAX_SAMPLE_BYTES:
        raise DataError(
            f"{stored.where}: a sample has {stored.row_bytes} bytes, at most {_MAX_SAMPLE_BYTES} are allowed"
        )


def _layout_hint(row: Sequence[int], sample: Sequence[int | str]) -> str:
    """Return a hint if the channels are last in the file and first in the model, or the reverse."""
    for axes, order in (((2, 0, 1), "0, 3, 1, 2"), ((1, 2, 0), "0, 2, 3, 1")):
        if len(row) == len(sample) == 3:
            moved = [row[axis] for axis in axes]
            if all(isinstance(want, str) or want == size for want, size in zip(sample, moved, strict=True)):
                return f"; .transpose({order}) gives that"
    return ""


def _check_lengths(columns: Sequence[StoredArray], labels: StoredArray | None) -> None:
    first, *others = columns
    if labels is not None and (labels.dtype.kind not in "iu" or len(labels.shape) != 1):
        raise DataError(
            f"{labels.where}: labels are {labels.dtype.name} {list(labels.shape)}, expected integers [N], one"
            " class number a sample (for one-hot labels: .argmax(-1))"
        )
    if first.shape[0] == 0:
        raise DataError(f"{first.where}: holds no samples")
    for other in others:
        if other.shape[0] != first.shape[0]:
            raise DataError(
                f"{other.where}: has {other.shape[0]} rows, but {first.where} has {first.shape[0]};"
                " each needs one row a sample"
            )
