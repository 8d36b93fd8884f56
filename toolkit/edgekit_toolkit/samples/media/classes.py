"""Finds class names in the names of folders, and compares them with the classes of a model."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from edgekit_runtime.drift.class_outputs import class_count
from edgekit_runtime.errors import DataError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.samples.boxes.formats import find_box_set
from edgekit_toolkit.samples.media.files import find_media, is_media

_SPLITS: Final = frozenset({"train", "training", "val", "valid", "validation", "test", "eval"})
_MAX_NAMED: Final = 10


def find_class_names(paths: Iterable[Path]) -> tuple[str, ...]:
    """Return the sorted class names from folders or label lists under `paths`, or an empty tuple.

    Raises:
        DataError: `find_media` failed, or the names are numbers whose order as text differs from their
            numeric order.
    """
    names: set[str] = set()
    for path in paths:
        if is_media(path) and find_box_set(path) is None:
            names |= find_media(path).class_names
    ordered = sorted(names)
    if all(name.isdecimal() for name in ordered):
        for before, after in itertools.pairwise(ordered):
            if int(before) > int(after):
                raise DataError(
                    f"the classes are called by numbers, and as text '{before}' comes before '{after}': give"
                    " --labels FILE with one name a line, in the order of the model's outputs"
                )
    return tuple(ordered)


def find_box_names(paths: Iterable[Path]) -> tuple[str, ...]:
    """Return the class names of the first data set with boxes in `paths`, in the order of the data set.

    The result is empty if there is no such data set.

    Raises:
        DataError: Something in a data set with boxes is missing or malformed, or a path cannot be read.
    """
    box_sets = (find_box_set(path) for path in paths)
    return next((box_set.names for box_set in box_sets if box_set is not None), ())


def check_class_count(names: Sequence[str], outputs: Sequence[TensorSpec]) -> None:
    """Check that the number of class names equals the number of classes of the model.

    The class scores must be the first of `outputs`.

    Raises:
        DataError: The numbers differ, or the first output does not contain class scores.
    """
    first = outputs[0]
    if len(first.shape) == 2 and class_count(first) in (0, len(names)):
        return
    count_text = "1 class was" if len(names) == 1 else f"{len(names)} classes were"
    source_text = f"{count_text} found in the names of folders ({_some(names)})"
    if any(name.lower() in _SPLITS for name in names):
        advice = "give the parts of the data set each by itself: --calibration DATA/train --eval DATA/test"
    elif len(first.shape) != 2:
        advice = "it gives no class scores: put all files into one folder, without sub-folders"
    else:
        advice = (
            f"give --labels FILE with the model's {class_count(first)} class names, one a line, in the order"
            " of its output; folders are then found by name, and need not be there for each class"
        )
    raise DataError(f"{source_text}, but output '{first.name}' of the model is {list(first.shape)}; {advice}")


def numbering_note(names: Sequence[str]) -> str:
    """Return a note for the user that says how classes were numbered without a label file."""
    return (
        f"classes are numbered by the sorted names of their folders ({_some(names)}), as torchvision does;"
        " give --labels if the model numbers them otherwise"
    )


def _some(names: Sequence[str]) -> str:
    text = ", ".join(f"{number} {name}" for number, name in enumerate(names[:_MAX_NAMED]))
    return text + (", ..." if len(names) > _MAX_NAMED else "")
