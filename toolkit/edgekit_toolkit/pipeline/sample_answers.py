"""Compares the answers of the float model and of the package on a few samples, for the user to look at."""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from edgekit_runtime.errors import DataError
from edgekit_runtime.preprocessing.images import SUFFIXES, ImageRules, decode_image
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.preprocessing.rules import read_rules
from edgekit_runtime.tasks.task import Context, Decoded, Outputs, read_task
from edgekit_toolkit.evaluation.scoring import spread_feeds
from edgekit_toolkit.pipeline.run import Run
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.tasks.proposal import first_row

if TYPE_CHECKING:
    from PIL import Image

MAX_SAMPLES: Final = 8
_MAX_JPEG_BYTES: Final = 30_000  # 40 kB as text
_PICTURE_FORMS: Final = ((320, 80), (320, 60), (320, 40), (200, 40))  # longest side and quality


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAnswers:
    """The answers of the two models for one sample.

    Attributes:
        name: The file name of the sample, or its number.
        floats, package: The decoded outputs of the float model and of the package. If decoding fails, the
            dict only contains an error message under the key `error`.
        size: The width and height of the image, or None if the sample is not an image.
        picture: A small copy of the image as a data URI, or an empty string.
    """

    name: str
    floats: Decoded
    package: Decoded
    size: tuple[int, int] | None = None
    picture: str = ""


@dataclass(frozen=True, slots=True)
class _Sample:
    name: str
    feeds: Feeds
    placement: Placement | None = None
    picture: str = ""


def compare_answers(run: Run) -> list[SampleAnswers]:
    """Return the answers for up to 8 evenly spaced samples, or an empty list without a task.

    Raises:
        BackendError: A model does not run on a sample.
    """
    if run.prepared.task.choice is None:
        return []
    task, options = read_task(run.prepared.task.choice, DataError)
    names = [spec.name for spec in run.prepared.source.outputs]
    runners = [model.open(names, threads=1) for model in (run.prepared.source.model, run.subject.model)]
    if (sequences := run.prepared.sequences) is not None:
        runners = [sequences.over_sequences(runner, steps="last") for runner in runners]
        names = [spec.name for spec in sequences.judged]

    def answer(outputs: Outputs, placement: Placement | None) -> Decoded:
        row = first_row(outputs, run.prepared.samples.evaluation.group)
        try:
            return task.decode(row, options, Context(labels=run.request.class_names, placement=placement))
        except DataError as error:
            return {"error": str(error)}

    answers = []
    for sample in _spread_samples(run):
        floats, package = (
            answer(dict(zip(names, runner(sample.feeds), strict=True)), sample.placement)
            for runner in runners
        )
        size = (
            (sample.placement.width, sample.placement.height)
            if sample.picture and sample.placement is not None
            else None
        )
        answers.append(
            SampleAnswers(name=sample.name, floats=floats, package=package, size=size, picture=sample.picture)
        )
    return answers


def _spread_samples(run: Run) -> Iterator[_Sample]:
    part, inputs = run.prepared.samples.evaluation, run.prepared.source.inputs
    count = min(len(part.names), MAX_SAMPLES)
    paths = [Path(part.names[index * len(part.names) // count]) for index in range(count)]
    fields = run.request.preprocessing
    if not paths or fields is None or any(path.suffix.lower() not in SUFFIXES for path in paths):
        for number, feeds in enumerate(spread_feeds(part, MAX_SAMPLES)):
            placement = Placement.of_input(next(iter(feeds.values())).shape)
            yield _Sample(f"sample {number + 1}", feeds, placement)
        return
    rules = read_rules(fields, inputs[0])
    assert isinstance(rules, ImageRules)  # noqa: S101  # the samples were read by it
    for path in paths:
        image = decode_image(path)
        pixels, placement = rules.fit(image)
        feed = np.repeat(rules.finish(pixels)[None], part.group, axis=0)
        yield _Sample(path.name, {inputs[0].name: feed}, placement, shrink_picture(image))


def shrink_picture(image: "Image.Image") -> str:
    """Return a small JPEG copy of an image as a data URI of up to 40 kB."""
    small, content = image.copy(), b""
    for side, quality in _PICTURE_FORMS:
        small.thumbnail((side, side))
        file = io.BytesIO()
        small.save(file, "JPEG", quality=quality)
        content = file.getvalue()
        if len(content) <= _MAX_JPEG_BYTES:
            break
    return "data:image/jpeg;base64," + base64.b64encode(content).decode()
