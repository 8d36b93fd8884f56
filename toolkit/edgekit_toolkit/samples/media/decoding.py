"""Decodes images and sound recordings on demand, as a shard of samples."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.preprocessing.audio import AudioRules
from edgekit_runtime.preprocessing.images import ImageRules, decode_image
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.preprocessing.rules import MediaRules, example_for, read_rules
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.samples.boxes.formats import find_box_set
from edgekit_toolkit.samples.masks import find_mask_set
from edgekit_toolkit.samples.media.files import Label, MediaFiles, find_media
from edgekit_toolkit.samples.selection import find_probabilities
from edgekit_toolkit.samples.shards import Batching, Shard
from edgekit_toolkit.samples.truth import TrueBoxes, TrueMask, TrueSteps, TrueText, Truth

# Decoding takes far longer than all else, and samples are read many times. Files beyond this are decoded each
# time.
KEPT_BYTES: Final = 256 << 20
_MIN_CHARACTERS: Final = 0.9
_MAX_NAMED: Final = 5  # unusable files in a message

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Decoding:
    """The settings for converting image and sound files to samples.

    Attributes:
        preprocessing: The content of the preprocessing file, or None. It is required for images and sound.
        classes: The class names in the order of the model's outputs, empty if they are unknown.
        labelled: Whether to read labels from class folders, label lists or data sets with boxes.
        in_steps: Whether a recording is a sequence that is cut into steps, for a model with states.
        split: The split to read, `train` or `val`, if the data set has splits.
        progress: Called when a file is decoded for the first time, with the number of decoded files and the
            total number of files.
    """

    preprocessing: Mapping[str, Any] | None = None
    classes: tuple[str, ...] = ()
    labelled: bool = True
    in_steps: bool = False
    split: str = "val"
    progress: Progress = field(default=lambda _done, _total: None)

    @property
    def classes_are_characters(self) -> bool:
        """Whether the model reads text. This is assumed if most class names are single characters."""
        count = sum(len(name) <= 1 for name in self.classes)
        return len(self.classes) > 1 and count > _MIN_CHARACTERS * len(self.classes)


def media_shard(path: Path, inputs: Sequence[TensorSpec], decoding: Decoding) -> Shard:
    """Return the files under `path` as a shard with one sample per file. They are decoded when read.

    Raises:
        DataError: There are no such files, the model has several inputs, the preprocessing is missing or does
            not fit, or a label is not a class of the model.
    """
    box_set = find_box_set(path, decoding.split) if decoding.labelled else None
    mask_set = find_mask_set(path) if decoding.labelled and box_set is None else None
    if box_set is not None:
        pictures = tuple(picture.file for picture in box_set.pictures)
        media = MediaFiles("image", pictures, None, box_set.notes)
    elif mask_set is not None:
        media = MediaFiles("image", mask_set.files, None, ())
    else:
        media = find_media(path, labelled=decoding.labelled, texts=decoding.classes_are_characters)
    if len(inputs) != 1 or not (decoding.in_steps or Batching.of(inputs).stacked):
        names = ", ".join(f"'{spec.name}' {list(spec.shape)}" for spec in inputs)
        raise DataError(f"{path}: one file a sample suits models with one batched input, got {names}")
    if decoding.preprocessing is None:
        raise DataError(_no_preprocessing(path, inputs, media.kind))
    rules = read_rules(decoding.preprocessing, inputs[0])
    stated = str(decoding.preprocessing.get("type", "image"))
    if stated != media.kind:
        raise DataError(f'{path}: holds "{media.kind}" files, but the preprocessing has the type "{stated}"')
    column = DecodedFiles(path, media.files, inputs[0], rules, decoding)
    columns = {inputs[0].name: column}
    files = tuple(map(str, media.files))
    root = path if path.is_dir() else path.parent
    shard = Shard(
        columns,
        None,
        files,
        media.notes,
        in_front=decoding.in_steps,
        probabilities=find_probabilities(root, files),
    )
    if media.events is not None:
        return replace(shard, labels=_true_steps(path, media, column, decoding), truth=TrueSteps)
    if box_set is not None:
        numbers = box_set.number_classes(decoding.classes, path)
        boxes = box_set.pictures
        labels = _Truths(len(boxes), lambda index: boxes[index].in_input(column.placement(index), numbers))
        return replace(shard, labels=labels, truth=TrueBoxes)
    if mask_set is not None:
        masks, count = mask_set, len(decoding.classes)
        labels = _Truths(
            len(masks.files), lambda index: masks.in_input(index, column.placement(index), count)
        )
        return replace(shard, labels=labels, truth=TrueMask)
    if media.labels is None:
        return shard
    if media.has_texts:
        texts = [TrueText(str(label), decoding.classes) for label in media.labels]
        return replace(shard, labels=_Truths(len(texts), texts.__getitem__), truth=TrueText)
    class_numbers = _numbers(path, media.labels, decoding.classes)
    return replace(shard, labels=_Truths(len(class_numbers), class_numbers.__getitem__))


class DecodedFiles:
    """The samples of one input, each decoded from a file.

    Up to `KEPT_BYTES` of decoded data are cached. Error messages name `path`.
    """

    def __init__(
        self, path: Path, files: Sequence[Path], spec: TensorSpec, rules: MediaRules, decoding: Decoding
    ) -> None:
        self.path = path
        self._files = tuple(files)
        self._spec = spec
        self._rules = rules
        self._in_steps = decoding.in_steps
        self._progress = decoding.progress
        self._cache: dict[int, NDArray[Any]] = {}
        self._placements: dict[int, Placement] = {}
        self._kept_bytes = 0
        self._decoded: set[int] = set()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [files]. The axes of a sample are not included, because their sizes may differ."""
        return (len(self._files),)

    def rows(self, keep: NDArray[np.bool_] | None = None) -> Iterator[NDArray[Any]]:
        """Decode and yield samples in the order of the files.

        `keep` is a mask of the files to read, bool [files]. By default all are read.

        Raises:
            DataError: A file cannot be used. The message also names later files that cannot be used.
        """
        indices = range(len(self._files)) if keep is None else np.flatnonzero(keep).tolist()
        for index in indices:
            try:
                loaded = self._load(index)
            except DataError as error:
                raise DataError(self._all_faults(str(error), index)) from error
            yield self._finish(loaded)

    def placement(self, index: int) -> Placement:
        """Return the position of an image in the model's input. The image is decoded if necessary."""
        if index not in self._placements:
            self._load(index)
        return self._placements[index]

    def time_steps(self, index: int) -> NDArray[np.float64]:
        """Return the start and end of each step of a recording in seconds, float64 [steps, 2].

        If steps overlap, the time of a step only covers the part that is not in the previous step.

        Raises:
            DataError: The files are not recordings that are cut into steps, or the file cannot be used.
        """
        if not (self._in_steps and isinstance(self._rules, AudioRules) and self._rules.samples):
            raise DataError(
                f"{self.path}: lists times of events, which suit a model with states (--state) and a"
                " preprocessing with 'samples'"
            )
        hop_s = (self._rules.hop or self._rules.samples) / self._rules.sample_rate
        begins = np.arange(len(self._load(index))) * hop_s
        return np.stack([begins, begins + hop_s], axis=1)

    def _finish(self, loaded: NDArray[Any]) -> NDArray[Any]:
        if not self._in_steps:
            return self._rules.finish(loaded)
        return np.stack([self._rules.finish(step) for step in loaded])

    def _load(self, index: int) -> NDArray[Any]:
        if index in self._cache:
            return self._cache[index]
        loaded: NDArray[Any]
        if isinstance(self._rules, ImageRules):
            loaded, self._placements[index] = self._rules.fit(decode_image(self._files[index]))
        elif self._in_steps:
            loaded = _cut_steps(self._files[index], self._rules)
        else:
            loaded = self._rules.load(self._files[index])
        shape = self._rules.finish(loaded[0] if self._in_steps else loaded).shape
        self._check_shape(shape, self._files[index])
        if self._kept_bytes + loaded.nbytes <= KEPT_BYTES:
            self._cache[index] = loaded
            self._kept_bytes += loaded.nbytes
        if index not in self._decoded:
            self._decoded.add(index)
            self._progress(len(self._decoded), len(self._files))
        return loaded

    def _check_shape(self, shape: tuple[int, ...], file: Path) -> None:
        sizes = self._spec.shape[1:]
        if all(size == want or isinstance(want, str) for size, want in zip(shape, sizes, strict=True)):
            return
        is_image = isinstance(self._rules, ImageRules)
        fields = "'resize', 'center_crop' or 'layout'" if is_image else "'samples' or 'features'"
        raise DataError(
            f"{file}: has shape {list(shape)} after the preprocessing, but input '{self._spec.name}' takes"
            f" {list(sizes)}; change {fields} in the preprocessing"
        )

    def _all_faults(self, first: str, index: int) -> str:
        """Return one message for all files that cannot be used, from `place` on."""
        faults = [first]
        for other in range(index + 1, len(self._files)):
            try:
                self._load(other)
            except DataError as error:  # noqa: PERF203 - what is slow is decoding
                faults.append(str(error))
        if len(faults) == 1:
            return first
        more = f"; and {len(faults) - _MAX_NAMED} more" if len(faults) > _MAX_NAMED else ""
        named = "; ".join(faults[:_MAX_NAMED])
        return f"{len(faults)} of {len(self._files)} files cannot be used: {named}{more}"


def _cut_steps(file: Path, rules: AudioRules) -> NDArray[Any]:
    """Return the steps of a recording, [steps, ...]: `samples` each, of which `hop` are new.

    Raises:
        DataError: the recording cannot be read, or the preprocessing states no length of a step.
    """
    length = rules.samples
    if length is None:
        raise DataError(
            f"{file}: a recording is cut into steps of a model with states: state 'samples', the length of a"
            " step, in the preprocessing, and 'hop' if fewer of them are new"
        )
    hop = rules.hop or length
    sound = replace(rules, samples=None, hop=None, features=None).load(file)
    missing = -len(sound) % hop
    padded = np.pad(sound, (length - hop, missing))
    steps = np.lib.stride_tricks.sliding_window_view(padded, length)[::hop]
    if rules.features is None:
        return np.asarray(steps)
    return np.stack([rules.features.compute(step, rules.sample_rate) for step in steps])


def _true_steps(path: Path, media: MediaFiles, column: DecodedFiles, decoding: Decoding) -> "_Truths":
    """Return which classes sound in each step: their event covers at least half of the step's new part."""
    events, classes = media.events or (), decoding.classes or tuple(sorted(media.class_names))
    if unknown := sorted(media.class_names - set(classes)):
        raise DataError(f"{path}: class '{unknown[0]}' is none of the labels ({_few(classes)})")

    def read(index: int) -> TrueSteps:
        times = column.time_steps(index)
        active = np.zeros((len(times), max(len(classes), 1)), np.bool_)
        for event in events[index]:
            if event.begin_s >= times[-1, 1]:
                raise DataError(
                    f"{media.files[index]}: ends after {times[-1, 1]:g} s, and an event of '{event.label}'"
                    f" begins at {event.begin_s:g} s"
                )
            covered = np.minimum(times[:, 1], event.end_s) - np.maximum(times[:, 0], event.begin_s)
            active[:, classes.index(event.label)] |= covered >= (times[:, 1] - times[:, 0]) / 2
        return TrueSteps(active)

    return _Truths(len(events), read)


@dataclass(frozen=True, slots=True)
class _Truths:
    count: int
    read: Callable[[int], Truth]

    def rows(self, keep: NDArray[np.bool_] | None = None) -> Iterator[Truth]:
        yield from map(self.read, range(self.count) if keep is None else np.flatnonzero(keep).tolist())


def _numbers(path: Path, labels: Sequence[Label], classes: Sequence[str]) -> list[int]:
    """Return the class number of each label."""
    if isinstance(labels[0], int):
        return [int(label) for label in labels]
    for name in dict.fromkeys(labels):
        count = classes.count(str(name))
        if count != 1:
            near = difflib.get_close_matches(str(name), classes, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise DataError(
                f"{path}: class '{name}' stands {count} times in the class names ({_few(classes)}), expected"
                f" once: name folders and labels as --labels does{hint}"
            )
    numbers = {name: number for number, name in enumerate(classes)}
    return [numbers[str(label)] for label in labels]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "there are none"


def _no_preprocessing(path: Path, inputs: Sequence[TensorSpec], kind: str) -> str:
    """Return the message for a missing preprocessing file, with an example for this model."""
    spec = inputs[0]
    takes = f"{path}: the model takes {spec.dtype} {list(spec.shape)}"
    example = example_for(inputs, kind)
    if example is None:
        features = "state 'features' of the sound (docs/guide/samples.md), or " if kind == "audio" else ""
        return f"{takes}, which is no {kind}; {features}preprocess the files yourself and give arrays (.npz)"
    return (
        f"{takes}; say how a file becomes that, as in training, when the package is made: --preprocessing"
        f" FILE.json, for example with {example} (docs/guide/samples.md)"
    )
