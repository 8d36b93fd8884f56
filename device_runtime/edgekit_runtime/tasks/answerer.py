"""Converts a photograph or sound to the inputs of a model, and the outputs to the answer of a task.

    answerer = open_answerer(package)
    prepared = answerer.prepare(data, MediaType.parse("image/jpeg"), max_pixels)
    answerer.answer(session.run(prepared.inputs), prepared.placement)     # {"detections": [...]}

The service runs these steps on threads.
"""

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from edgekit_runtime.canonical_json import JsonValue, decode_json
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.errors import DataError, PackageError, RequestError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.preprocessing.audio import AudioRules
from edgekit_runtime.preprocessing.images import ImageRules
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.preprocessing.rules import MediaRules, read_rules
from edgekit_runtime.records import dataclass
from edgekit_runtime.tasks.task import Context, Decoded, Outputs, Task, read_task
from edgekit_runtime.tensors import DTYPES, Array, Floats, TensorSpec

if TYPE_CHECKING:
    from PIL import Image

Media: TypeAlias = "Image.Image | Floats"
"""An RGB or grey picture, or sound with amplitudes -1..1 [samples]."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The inputs for one sample.

    Attributes:
        inputs: A dict from input name to an array with a batch of 1.
        placement: The position of the picture in the input, or None for sound.
    """

    inputs: Mapping[str, Array]
    placement: Placement | None


class Answerer:
    """The preprocessing, task and labels of a package. It never blocks and does not run the model.

    Attributes:
        blank: A dict from input name to an array of zeros with the shape in `Prepared.inputs`. None if there
            is no preprocessing, or if a dimension other than the batch is free.
    """

    __slots__ = ("_options", "_spec", "blank", "labels", "rules", "task")

    def __init__(
        self,
        spec: TensorSpec,
        *,
        rules: MediaRules | None,
        task: Task | None,
        options: Any = None,
        labels: tuple[str, ...] = (),
    ) -> None:
        """Keep what all requests need; `spec` is the input that the preprocessing fills."""
        self._spec, self.rules, self.task, self._options, self.labels = spec, rules, task, options, labels
        self.blank: Mapping[str, Array] | None = None
        sizes = [size for size in spec.shape[1:] if isinstance(size, int)]
        if rules is not None and len(sizes) == len(spec.shape) - 1:
            self.blank = {spec.name: np.broadcast_to(np.zeros((), DTYPES[spec.dtype]), (1, *sizes))}

    @property
    def media_input(self) -> str | None:
        """The name of the input for photographs or sound, or None without preprocessing."""
        return None if self.rules is None else self._spec.name

    @property
    def file_type(self) -> MediaType:
        """The default media type of files: `image/jpeg` for pictures, else `audio/wav`."""
        return MediaType("image/jpeg" if isinstance(self.rules, ImageRules) else "audio/wav")

    def with_options(self, changes: Mapping[str, JsonValue]) -> "Answerer":
        """Return an answerer with changed options of the task. Their ranges are not checked."""
        options = replace(self._options, **changes)
        return Answerer(self._spec, rules=self.rules, task=self.task, options=options, labels=self.labels)

    def prepare(self, data: "bytes | memoryview", media_type: MediaType, max_pixels: int) -> Prepared:
        """Return the inputs for a photograph or sound.

        Raises:
            DataError: The data cannot be decoded, are too large, or do not fit the model.
            RequestError: The package has no preprocessing for this kind of media.
        """
        rules = self.rules
        if rules is None:
            raise RequestError(
                400,
                "the package has no preprocessing and takes only tensors; package it with --preprocessing",
            )
        if media_type.is_image is not isinstance(rules, ImageRules):
            kind = "a picture" if isinstance(rules, ImageRules) else "sound"
            raise RequestError(415, f"the model takes {kind}, the media type is {media_type.name}")
        if isinstance(rules, ImageRules):
            return self.prepare_decoded(media_type.read_image(data, max_pixels))
        return self._feed(rules.finish(media_type.read_sound(data, rules)))

    def prepare_decoded(self, media: Media, origin: tuple[int, int] = (0, 0)) -> Prepared:
        """Return the inputs for decoded media. A sound must have the sample rate of the preprocessing.

        `origin` is the x and y of the upper left corner if `media` is a crop. Answers are then in pixels of
        the whole picture.

        Raises:
            DataError: The media do not fit the model.
        """
        rules = self.rules
        if isinstance(rules, ImageRules):
            pixels, placement = rules.fit(media)  # type: ignore[arg-type]  # the rules say which
            return self._feed(rules.finish(pixels), replace(placement, origin=origin))
        assert rules is not None  # noqa: S101  # for the type checker
        return self._feed(rules.finish(rules.fit(media, rules.sample_rate)))  # type: ignore[arg-type]  # as above

    def _feed(self, sample: Array, placement: Placement | None = None) -> Prepared:
        array = sample[None]
        self._spec.check(array)
        return Prepared({self._spec.name: array}, placement)

    def answer(
        self, outputs: Outputs, placement: Placement | None, overrides: Mapping[str, JsonValue] | None = None
    ) -> Decoded:
        """Decode the outputs of one sample to an answer, which is a JSON object.

        Args:
            outputs: A dict from output name to an array with a batch of 1.
            placement: The placement from `prepare`. If it is None, the answer has positions in the input.
            overrides: Options of the task for this answer only.

        Raises:
            RequestError: The package has no task, or an option is invalid.
            DataError: The outputs do not fit the task, or contain NaN.
        """
        if self.task is None:
            raise RequestError(400, "the package states no task; package it with --task")
        options = self._options
        if overrides:
            try:
                options = from_plain(self.task.options, {**to_plain(options), **overrides}, "", DataError)
            except DataError as error:
                raise RequestError(400, str(error)) from error
        duration_s = self.rules.duration_s if isinstance(self.rules, AudioRules) else None
        context = Context(labels=self.labels, placement=placement, duration_s=duration_s)
        return self.task.decode(outputs, options, context)

    def find_fault(self, inputs: Mapping[str, Array], outputs: Outputs) -> str | None:
        """Return the reason why the task cannot decode outputs of the model, or None.

        The result is also None if there is no task or the batch is not 1. A picture is assumed to fill the
        input.
        """
        array, rules = inputs.get(self._spec.name), self.rules
        if self.task is None or array is None or array.shape[:1] != (1,):
            return None
        placement = None
        if isinstance(rules, ImageRules):
            height, width = (array.shape[rules.layout.index(side)] for side in "HW")
            placement = Placement.of(width, height)
        try:
            self.answer(outputs, placement)
        except DataError as error:
            return str(error)
        return None


def open_answerer(package: OpenedPackage) -> Answerer:
    """Return the answerer of a package, which may lack preprocessing or a task.

    Raises:
        PackageError: The preprocessing or the task is malformed or does not fit the model.
    """
    manifest = package.manifest
    states = {state.input for state in manifest.states}
    specs = [spec for spec in manifest.inputs if spec.name not in states]
    spec, rules = (specs or manifest.inputs)[0], None
    try:
        if manifest.preprocessing is not None:
            fields = decode_json(
                bytes(package.read(manifest.preprocessing)), manifest.preprocessing, PackageError
            )
            rules = read_rules(fields, spec) if len(specs) == 1 else None
    except DataError as cause:  # such as features that the user computes: it is a description for people
        if manifest.task is not None:
            raise PackageError(f"{package.path}: {cause}") from cause
    task, options = (None, None) if manifest.task is None else read_task(manifest.task)
    labels: tuple[str, ...] = ()
    if manifest.labels is not None:
        labels = class_names(bytes(package.read(manifest.labels)).decode("utf-8", "replace"))
    return Answerer(spec, rules=rules, task=task, options=options, labels=labels)


def class_names(labels: str) -> tuple[str, ...]:
    """Return the class names in the content of a labels file, in the order of the classes.

    Source: docs/reference/package-format.md, Labels.
    """
    # Not splitlines(), which also splits at rarer characters that may be part of a name.
    return tuple(line.removesuffix("\n") for line in io.StringIO(labels, newline=None))
