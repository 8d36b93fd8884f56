"""Decides the task of a package. The user states it with `--task`, or it is proposed from outputs."""

import json
from dataclasses import dataclass
from typing import Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import DataError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.tasks.task import Context, Outputs, load_tasks, read_task
from edgekit_toolkit.tasks.proposers import PROPOSERS, Evidence

AUTO: Final = "auto"
NONE: Final = "none"


@dataclass(frozen=True, slots=True)
class TaskDecision:
    """The task of a package.

    Attributes:
        choice: The task and its options as in the manifest, or None if the package has no task.
        reason: The reason for the decision, such as `as requested`.
        is_proposed: Whether the task was inferred from the outputs.
    """

    choice: TaskChoice | None
    reason: str
    is_proposed: bool = False

    def describe(self) -> str:
        """Return one line for the user with the task, the reason, and how to change it."""
        if self.choice is None:
            return f"no task: {self.reason}; --task NAME[:KEY=VALUE,...] states one"
        listed = f" ({', '.join(_write_options(self.choice))})" if self.choice.options else ""
        return f"{self.choice.name}{listed}, {self.reason}; --task changes it, --task none leaves it out"


def parse_task(text: str) -> TaskChoice | None:
    """Parse a task from `NAME[:KEY=VALUE,…]`. Values are JSON or plain text. `none` returns None.

    Raises:
        DataError: The text is malformed, or the task or an option does not exist.
    """
    if text == NONE:
        return None
    name, _, listed = text.partition(":")
    options: dict[str, JsonValue] = {}
    for part in _split(listed):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise DataError(f"--task {text}: '{part}' is no KEY=VALUE")
        try:
            options[key.strip()] = json.loads(value)
        except ValueError:
            options[key.strip()] = value
    if name not in load_tasks():
        names = ", ".join((AUTO, NONE, *sorted(load_tasks())))
        raise DataError(f"--task {text}: there is no task '{name}', expected one of {names}")
    choice = TaskChoice(name, options)
    read_task(choice, DataError)
    return choice


def _split(listed: str) -> list[str]:
    """Return the parts between commas that are in no brackets."""
    parts, depth = [""], 0
    for character in listed:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part]


def write_task(choice: TaskChoice) -> str:
    """Return a task in the format `NAME[:KEY=VALUE,…]` that `parse_task` reads."""
    return ":".join([choice.name, *filter(None, [",".join(_write_options(choice))])])


def _write_options(choice: TaskChoice) -> list[str]:
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
        for key, value in choice.options.items()
    ]


def decide_task(requested: str, evidence: Evidence) -> TaskDecision:
    """Return the requested task of a package, or the task that the outputs suggest.

    If both tasks have the same name and layout, options that the request lacks are taken from the suggested
    task.

    `requested` is `auto`, `none`, or a task in the format of `parse_task`.

    Raises:
        DataError: The requested task is unknown or cannot decode the outputs.
    """
    proposal = _propose(evidence)
    if requested == AUTO:
        if proposal is None:
            return TaskDecision(None, "the outputs do not tell for certain what they mean")
        return TaskDecision(proposal, "proposed by the outputs", is_proposed=True)
    choice = parse_task(requested)
    if choice is None:
        return TaskDecision(None, "as requested")
    if proposal is not None and proposal.name == choice.name:
        layout = proposal.options.get("layout")
        if choice.options.get("layout", layout) == layout:
            choice = TaskChoice(choice.name, {**proposal.options, **choice.options})
    try:
        _try(choice, evidence)
    except DataError as error:
        fitting = "no task is certain" if proposal is None else f"--task {write_task(proposal)} fits"
        shapes = {name: list(value.shape) for name, value in evidence.probes.runs[0].items()}
        raise DataError(f"--task {requested}: {error}; the outputs are {shapes}; {fitting}") from error
    return TaskDecision(choice, "as requested")


def _propose(evidence: Evidence) -> TaskChoice | None:
    choices = (propose(evidence) for propose in PROPOSERS)
    return next((choice for choice in choices if choice is not None), None)


def _try(choice: TaskChoice, evidence: Evidence) -> None:
    """Decode the outputs of a sample.

    Raises:
        DataError: they are not those of the task.
    """
    task, options = read_task(choice, DataError)
    sample = first_row(evidence.probes.runs[0], evidence.probes.samples or 1)
    try:
        task.decode(sample, options, Context(labels=evidence.labels, placement=evidence.placement))
    except (KeyError, IndexError, ValueError) as error:  # of a decoder that presumes shapes
        raise DataError(f"task {choice.name} cannot read the outputs ({error})") from error


def first_row(outputs: Outputs, count: int) -> Outputs:
    """Return the first row of each output, [1, ...]. Outputs that do not have `count` rows are unchanged."""
    if count == 1:
        return outputs
    return {name: value[:1] if value.shape[:1] == (count,) else value for name, value in outputs.items()}
