"""The record of a task, and the table of all tasks.

    @register("regression", RegressionOptions, "Named values, scaled to the unit of the user.")
    def _decode(outputs: Outputs, options: RegressionOptions, context: Context) -> Decoded: ...

    task, options = read_task(manifest.task)
    task.decode(outputs, options, context)        # {"values": [0.31]}

Adding a task is one module in `tasks/kinds/`.
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
    """What a decoder knows apart from the outputs.

    Attributes:
        labels: names of the classes, in the order of the model's outputs; empty if there are none.
        placement: where the picture lies in the input; if it is None, answers give positions in the input.
        duration_s: length of the input, for sound of a known length; else None.
    """

    labels: tuple[str, ...] = ()
    placement: Placement | None = None
    duration_s: float | None = None

    def name_class(self, index: int) -> str:
        """Return the label of a class, or its number where the list of labels is too short."""
        return self.labels[index] if 0 <= index < len(self.labels) else str(index)


Decode: TypeAlias = Callable[[Outputs, Any, Context], Decoded]
"""(outputs of one sample, each with the first axis 1; options; context) -> the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One meaning of outputs.

    Attributes:
        name: name in manifests and for `--task`.
        title: name for people.
        sentence: what its answers hold, for documents and `--help`.
        options: frozen dataclass of its options, all with defaults.
        decode: decodes the outputs of one sample to the answer.
        entries: field of its answers with a list of labels and scores, the best first; empty for none.
        has_boxes: whether each entry of that list has a box.
    """

    name: str
    title: str
    sentence: str
    options: type[Any]
    decode: Decode
    entries: str = ""
    has_boxes: bool = False


TASKS: Final[dict[str, Task]] = {}
"""Name -> record; `load_tasks` fills it."""


def register(
    name: str,
    options: type[Any],
    sentence: str,
    *,
    title: str = "",
    entries: str = "",
    has_boxes: bool = False,
) -> Callable[[Decode], Task]:
    """Return a decorator that adds a `Task` with these fields to `TASKS`; an empty `title` becomes `name`."""

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
    """Return the table of all tasks, whose modules are imported on the first call."""
    from edgekit_runtime.tasks import kinds  # noqa: F401  # registers them

    return TASKS


def read_task(choice: TaskChoice, error: type[DataError | PackageError] = PackageError) -> tuple[Task, Any]:
    """Return the task that a manifest or a command names, and its options as an instance of `Task.options`.

    Raises:
        error: there is no such task, or an option is unknown or out of its range.
    """
    tasks = load_tasks()
    if choice.name not in tasks:
        raise error(f"task '{choice.name}' is unknown here, expected one of {', '.join(sorted(tasks))}")
    task = tasks[choice.name]
    return task, from_plain(task.options, dict(choice.options), f"task {choice.name}", error)
