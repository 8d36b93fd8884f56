"""Checks whether the labels of a package match the classes of its model."""

from collections.abc import Iterator, Sequence
from typing import Final

from edgekit_runtime.errors import DataError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.tasks.kinds.classification import ClassificationOptions
from edgekit_runtime.tasks.kinds.detection import LAYOUTS, DetectionOptions
from edgekit_runtime.tasks.kinds.segmentation import SegmentationOptions
from edgekit_runtime.tasks.task import read_task
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.tasks.proposal import TaskDecision

_CLEARLY_LONGER: Final = 4
_MAX_NAMED: Final = 3
_WITH_A_CLASS_AXIS: Final = ("classification", "segmentation", "text", "sound_events")


def find_label_problems(
    labels: Sequence[str], task: TaskDecision, outputs: Sequence[TensorSpec]
) -> Iterator[str]:
    """Yield warnings for the user if labels do not match the model, or if the task needs labels.

    `labels` are the class names, empty if there are none. `outputs` are those of the source model.
    """
    count, classes = len(labels), _count_classes(len(labels), task.choice, outputs)
    if labels and classes is None:
        axes = [size for spec in outputs for size in spec.shape[1:]]
        is_fit = count in axes or any(isinstance(size, str) for size in axes)
        if not is_fit and (task.choice is None or task.choice.name in _WITH_A_CLASS_AXIS):
            shapes = ", ".join(f"'{spec.name}' {list(spec.shape)}" for spec in outputs)
            yield f"there are {count} labels, but no output has an axis of {count} classes: {shapes}"
    elif labels and classes is not None:
        both = f"there are {count} labels, and the model has"
        if count < classes:
            is_single = count == classes - 1
            range_text = (
                f"class {count} by its number" if is_single else f"classes {count} to {classes - 1} by number"
            )
            yield f"{both} {classes} classes: answers call {range_text}; give --labels with {classes} lines"
        elif count > classes:
            named = ", ".join(labels[classes : classes + _MAX_NAMED])
            named += ", ..." if count - classes > _MAX_NAMED else ""
            yield (
                f"{both} {classes} classes: the last {count - classes} are of no class ({named}). If the"
                f" others are shifted, all answers are wrong; give --labels with {classes} lines"
            )
        elif task.is_proposed and task.choice is not None and task.choice.options.get("background") == 1:
            yield (
                f"{both} {classes + 1} classes: the first one is taken for the background. If it has a name,"
                f" give --labels with {classes + 1} lines and --task {task.choice.name}"
            )
    options = _read_options(task.choice)
    lengths = _row_lengths(options, outputs) if isinstance(options, DetectionOptions) else ()
    is_unclear = len(lengths) == 2 and max(lengths) < _CLEARLY_LONGER * min(lengths)
    if is_unclear and isinstance(options, DetectionOptions) and not _labelled_length(count, options, lengths):
        yield (
            f"nothing tells which axis of {list(lengths)} counts the boxes, so the longer one was taken;"
            " --labels with all classes tells them apart"
        )


def _read_options(choice: TaskChoice | None) -> object:
    return None if choice is None else read_task(choice, DataError)[1]


def _row_lengths(options: DetectionOptions, outputs: Sequence[TensorSpec]) -> tuple[int, ...]:
    """Return the lengths of two axes: one counts boxes, the other holds their classes."""
    shapes = {spec.name: spec.shape for spec in outputs}
    sizes = shapes.get(options.output or outputs[0].name, ())[-2:]
    return tuple(size for size in sizes if isinstance(size, int)) if LAYOUTS[options.layout].leading else ()


def _labelled_length(labels: int, options: DetectionOptions, lengths: Sequence[int]) -> int:
    """Return the length that holds a score for each label; 0 if none does, or both do."""
    first = LAYOUTS[options.layout].leading + (options.background != "none")
    fitting = [length for length in lengths if labels and length == first + labels]
    return fitting[0] if len(fitting) == 1 else 0


def _count_classes(labels: int, choice: TaskChoice | None, outputs: Sequence[TensorSpec]) -> int | None:
    """Return the number of named classes, inferred from the shapes of outputs; None if it is ambiguous."""
    options, shapes = _read_options(choice), {spec.name: spec.shape for spec in outputs}
    if isinstance(options, ClassificationOptions):
        size = shapes.get(options.output or outputs[0].name, (0,))[-1]
        return size - options.background if isinstance(size, int) else None
    if isinstance(options, SegmentationOptions):
        shape = shapes.get(options.output or outputs[0].name, ())
        size = shape[1 if options.layout == "NCHW" else 3] if len(shape) == 4 else 1
        return size if isinstance(size, int) and size > 1 else None
    if not isinstance(options, DetectionOptions):
        return None
    background = int(options.background != "none")
    if lengths := _row_lengths(options, outputs):
        length = _labelled_length(labels, options, lengths) or min(lengths)
        return length - LAYOUTS[options.layout].leading - background if len(lengths) == 2 else None
    size = shapes.get(options.scores_output, ("",))[-1]
    return size - background if isinstance(size, int) and options.layout in ("apart", "anchors") else None
