"""The record of a task and the registry of all tasks.

    @register("regression", RegressionOptions, "Named values, scaled to the unit of the user.")
    def _decode(outputs: Outputs, options: RegressionOptions, context: Context) -> Decoded: ...

    task, options = read_task(manifest.task)
    task.decode(outputs, options, context)        # {"values": [{"value": 0.31, ...}]}

To add a task, add a module to `tasks/kinds/`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import DataError, PackageError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import Array

Outputs: TypeAlias = Mapping[str, Array]
Decoded: TypeAlias = dict[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The data that a decoder needs in addition to the outputs.

    Attributes:
        labels: The names of the classes in the order of the model's outputs, or empty.
        placement: The position of the picture in the input. If it is None, answers have positions in the
            input.
        duration_s: The length of a sound in seconds, or None if it varies.
    """

    labels: tuple[str, ...] = ()
    placement: Placement | None = None
    duration_s: float | None = None

    def name_class(self, index: int) -> str:
        """Return the label of a class, or its index if there are too few labels."""
        return self.labels[index] if 0 <= index < len(self.labels) else str(index)


Decode: TypeAlias = Callable[[Outputs, Any, Context], Decoded]
"""Takes the outputs of one sample (first axis 1), options and context, and returns the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task, which decodes the outputs of a model.

    Attributes:
        name: The name in manifests and for `--task`.
        title: The name for users.
        sentence: The content of the answers, for documents and `--help`.
        options: The frozen dataclass of the options, which all have defaults.
        decode: Decodes the outputs of one sample to an answer.
        entries: The field of the answer with a list of labels and scores, best first, or empty.
        has_boxes: Whether each entry of that list has a box.
    """

    name: str
    title: str
    sentence: str
    options: type[Any]
    decode: Decode
    entries: str = ""
    has_boxes: bool = False


TASKS: Final[dict[str, Task]] = {}
"""A dict from names to tasks, filled by `load_tasks`."""


def register(
    name: str,
    options: type[Any],
    sentence: str,
    *,
    title: str = "",
    entries: str = "",
    has_boxes: bool = False,
) -> Callable[[Decode], Task]:
    """Return a decorator that adds a `Task` with these fields to `TASKS`. `title` defaults to `name`."""

    def add(decode: Decode) -> Task:
        TASKS[name] = Task(
            name=name,
            title=title or name.replace("_", " "),
            sentence=sentence,
            options=options,
            decode=decode,
            entries=entries,
            has_boxes=has_boxes,
        )
        return TASKS[name]

    return add


def load_tasks() -> Mapping[str, Task]:
    """Return the registry of all tasks. Their modules are imported on the first call."""
    from edgekit_runtime.tasks import kinds  # noqa: F401  # registers them

    return TASKS


def read_task(choice: TaskChoice, error: type[DataError | PackageError] = PackageError) -> tuple[Task, Any]:
    """Return the task that a manifest or command names, and its options as an instance of `Task.options`.

    Raises:
        DataError, PackageError: The task or an option is unknown, or an option is out of range. The class is
            `error`.
    """
    tasks = load_tasks()
    if choice.name not in tasks:
        raise error(f"task '{choice.name}' is unknown here, expected one of {', '.join(sorted(tasks))}")
    task = tasks[choice.name]
    return task, from_plain(task.options, dict(choice.options), f"task {choice.name}", error)
