"""Chooses disjoint calibration and evaluation samples from the user's data, or generates them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.samples.generated import DEFAULT_RANGE, Feeds, generate_feeds
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.samples.selection import Weights, weigh
from edgekit_toolkit.samples.shards import Batching
from edgekit_toolkit.samples.source import Batch, DataSource, open_data, split
from edgekit_toolkit.samples.truth import Truth

_GENERATED_CALIBRATION = 16
_GENERATED_EVALUATION = 16
_GENERATED_SEED = 1
# For data that serve both: the share that calibrates, and the most samples that help a range.
_CALIBRATION_SHARE = 0.5
_MAX_CALIBRATION = 512
# Generated values have the range of these samples' values.
_RANGE_FEEDS = 16

Ranges = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Samples for calibration or for evaluation.

    Attributes:
        kind: The origin of the samples for the report, such as `user` or `generated`.
        sha256: The digest of the samples' content, or None for generated samples.
        labelled: Whether `stream` yields labels.
        truth: The type of the labels: `int` for class numbers, or a class of the module `truth`.
        stream: Returns a new stream. Its argument is the batch size, which is ignored if the model fixes it.
        in_front: Whether samples have an additional axis in front of the axes of the inputs.
        names: The file of each sample, empty unless each sample has its own file.
        probabilities: The probability with which each sample was selected (see `selection`), or None.
        group: The batch size that the model fixes, or 1.
    """

    kind: str
    count: int
    sha256: str | None
    labelled: bool
    stream: Callable[[int], Iterator[Batch]]
    in_front: bool = False
    group: int = 1
    truth: type[Truth] = int
    names: tuple[str, ...] = ()
    probabilities: Weights | None = None

    @property
    def weights(self) -> Weights | None:
        """The number of requests that each sample represents, float64 [count], or None for equal weights."""
        return None if self.probabilities is None else weigh(self.probabilities)

    @property
    def field_count(self) -> int:
        """The number of samples from the field."""
        return 0 if self.probabilities is None else int(np.count_nonzero(~np.isnan(self.probabilities)))

    @property
    def is_generated(self) -> bool:
        """Whether the samples are generated. Generated samples cannot be used to measure accuracy."""
        return self.kind == "generated"


@dataclass(frozen=True, slots=True)
class Samples:
    """Calibration and evaluation samples, and warnings about them. Each warning is one sentence."""

    calibration: Part
    evaluation: Part
    warnings: tuple[str, ...]


def choose_samples(
    inputs: Sequence[TensorSpec],
    calibration: Path | None,
    evaluation: Path | None,
    dims: Mapping[str, int],
    ranges: Ranges | None = None,
    *,
    decoding: Decoding | None = None,
) -> Samples:
    """Return disjoint calibration and evaluation samples.

    If only one of the paths is given, its samples are split for both purposes. A single sample is used for
    both, with a warning. If neither path is given, the samples are generated.

    Args:
        inputs: The inputs of the model.
        calibration: The path of the user's unlabelled samples, or None.
        evaluation: The path of the user's evaluation samples, or None.
        dims: The sizes of free dimensions in generated samples.
        ranges: The ranges of generated inputs, as for `generate_feeds`.
        decoding: The settings for images and recordings.

    Raises:
        DataError: The data do not fit the model, or there are too few samples.
    """
    training = replace(decoding or Decoding(), split="train")
    first = None if calibration is None else open_data(calibration, inputs, decoding=training)
    second = None if evaluation is None else open_data(evaluation, inputs, decoding=decoding)
    notes = [
        f"{role}: {note}"
        for role, source in (("calibration", first), ("evaluation", second))
        if source
        for note in source.warnings
    ]
    if first is None:
        if second is None:
            return _all_generated(inputs, dims, ranges, notes)
        return _from_one(second, "--eval", "user", notes)
    if second is None:
        return _from_one(first, "--calibration", "held-out part of calibration", notes)
    if calibration == evaluation and first.names == second.names:  # no parts of their own for both
        unlabelled = _unlabelled(calibration, inputs, training, second)
        if unlabelled is None:
            return _from_one(second, "one folder", "user", notes)
        first = unlabelled
    apart = _held_out(second, first, notes)
    _note_thinning(first, notes)
    return Samples(_part("user", _thinned(first)), _part("user", apart), tuple(notes))


def _unlabelled(
    path: Path | None, inputs: Sequence[TensorSpec], decoding: Decoding, judging: DataSource
) -> DataSource | None:
    """Return the samples of a folder that nobody has labelled, for calibration; None if there are few."""
    if path is None or not (judging.labelled and judging.names):
        return None
    whole = open_data(path, inputs, decoding=replace(decoding, labelled=False))
    labelled = frozenset(judging.names)
    is_free = np.array([name not in labelled for name in whole.names])
    return whole.selected(is_free) if is_free.sum() >= _GENERATED_CALIBRATION else None


def _all_generated(
    inputs: Sequence[TensorSpec], dims: Mapping[str, int], ranges: Ranges | None, notes: list[str]
) -> Samples:
    notes.append(
        "NO DATA: ranges and scores come from generated inputs, so the accuracy of this package is not"
        " known; give --calibration and --eval with real samples"
    )
    calibration, evaluation = (
        _generated(partial(generate_feeds, inputs, 1, dims=dims, ranges=ranges), inputs, count, seed)
        for count, seed in (
            (_GENERATED_CALIBRATION, _GENERATED_SEED),
            (_GENERATED_EVALUATION, _GENERATED_SEED + 1),
        )
    )
    return Samples(calibration, evaluation, tuple(notes))


def _from_one(whole: DataSource, role: str, held_out_kind: str, notes: list[str]) -> Samples:
    """Split the only given data: one part calibrates, the other judges."""
    if len(whole) < 2 * (whole.batching.size or 1):
        notes.append("one sample calibrates and judges, because there is no other: the score says nothing")
        part = _part("calibration data again", whole)
        return Samples(_part("user", whole), part, tuple(notes))
    used, held_out = split(whole, _CALIBRATION_SHARE, _GENERATED_SEED)
    held_out = _held_out(held_out, used, notes)
    _note_thinning(used, notes)
    judging = "1 other judges" if len(held_out) == 1 else f"{len(held_out)} others judge"
    notes.append(f"only {role} was given: {len(used)} of its samples calibrate, {judging}")
    return Samples(_part("user", _thinned(used)), _part(held_out_kind, held_out), tuple(notes))


def _held_out(judging: DataSource, calibrating: DataSource, notes: list[str]) -> DataSource:
    """Return the distinct judging samples that do not calibrate, and note how many were left out.

    A copy is no new evidence: counted twice it would make intervals too narrow, and the two halves agree.
    """
    calibration_digests = {digest for digest, _ in calibrating.digests()}
    labels: dict[bytes, set[str]] = {}
    fresh: list[bool] = []
    shared = 0
    for digest, label in judging.digests():
        shared += digest in calibration_digests
        fresh.append(not (digest in calibration_digests or digest in labels))
        labels.setdefault(digest, set()).add(label)
    copies = len(fresh) - sum(fresh) - shared
    contradicting = sum(len(classes) > 1 for classes in labels.values())
    reasons = {"calibration samples too": shared, "copies of others": copies}
    parts = [f"{count} evaluation samples are {reason}" for reason, count in reasons.items() if count]
    if not parts:
        return judging
    if sum(fresh) < (judging.batching.size or 1):
        raise DataError(
            f"{' and '.join(parts)} (of equal content), and of {len(fresh)} too few are left to judge by:"
            " give --eval with distinct samples that do not calibrate"
        )
    notes += [f"{part}, and were left out of judging" for part in parts]
    if contradicting:
        notes.append(
            f"{contradicting} evaluation samples have copies with another label; of those that judge,"
            " the first counts"
        )
    return judging.selected(np.array(fresh))


def _note_thinning(source: DataSource, notes: list[str]) -> None:
    if len(source) > _MAX_CALIBRATION:
        notes.append(f"{_MAX_CALIBRATION} of {len(source)} calibration samples are used, evenly spread")


def _thinned(source: DataSource) -> DataSource:
    """Return at most `_MAX_CALIBRATION` samples, spread evenly: more take time and do not change ranges."""
    if len(source) <= _MAX_CALIBRATION:
        return source
    chosen: NDArray[np.bool_] = np.zeros(len(source), np.bool_)
    chosen[np.linspace(0, len(source) - 1, _MAX_CALIBRATION).astype(np.int64)] = True
    return source.selected(chosen)


def _part(kind: str, source: DataSource) -> Part:
    group = source.batching.size or 1
    return Part(
        kind=kind,
        count=len(source),
        sha256=source.sha256,
        labelled=source.labelled,
        stream=source.stream,
        in_front=source.in_front,
        group=group,
        truth=source.truth,
        names=source.names,
        probabilities=source.probabilities,
    )


def _generated(
    generate: Callable[[int], list[Feeds]], inputs: Sequence[TensorSpec], count: int, seed: int
) -> Part:
    def stream(_batch: int) -> Iterator[Batch]:
        for number in range(count):
            yield generate(seed * 1000 + number)[0], None

    group = Batching.of(inputs).size or 1
    return Part(
        kind="generated", count=count * group, sha256=None, labelled=False, stream=stream, group=group
    )


def feeds_only(part: Part) -> Iterator[Feeds]:
    """Yield the inputs of the samples, in the smallest batch size that the model accepts."""
    for feeds, _ in part.stream(1):
        yield feeds


def first_feeds(part: Part, count: int) -> list[Feeds]:
    """Return the first `count` feeds or fewer, in the smallest batch size that the model accepts."""
    return list(islice(feeds_only(part), count))


def read_ranges(
    path: Path, inputs: Sequence[TensorSpec], decoding: Decoding | None = None
) -> tuple[Feeds, dict[str, tuple[float, float]]]:
    """Return the user's first sample, and the range of values to generate for each input.

    The range of an input, (low, high), covers its values in the first samples. An integer input with one
    element, such as a sampling rate or a length, keeps its value in the first sample because it must match
    the shapes of that sample. If all inputs are constant, float inputs get `DEFAULT_RANGE`.

    Raises:
        DataError: The samples cannot be read, see `open_data` and `DataSource.stream`.
    """
    first: Feeds = {}
    ranges: dict[str, tuple[float, float]] = {}
    for feeds, _ in islice(open_data(path, inputs, decoding=decoding).stream(1), _RANGE_FEEDS):
        for name, value in feeds.items():
            kind, is_one = value.dtype.kind, value.size == 1 and value.dtype.kind != "f"
            if kind not in "fiu" or not value.size or (first and is_one):
                continue
            low, high = ranges.get(name, (float("inf"), float("-inf")))
            ranges[name] = (min(low, float(value.min())), max(high, float(value.max())))
        first = first or feeds
    if all(low == high for low, high in ranges.values()):
        floats = {name for name in ranges if first[name].dtype.kind == "f"}
        ranges |= dict.fromkeys(floats, DEFAULT_RANGE)
    return first, ranges
