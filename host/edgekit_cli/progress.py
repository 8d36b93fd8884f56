"""Shows the progress of a long command, as a bar on a terminal or as occasional lines elsewhere."""

import sys
from time import monotonic

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

PLAIN_INTERVAL_S = 10.0  # least time between two lines. A short command prints none


class ProgressBar:
    """Shows the current step as a bar on a terminal, or otherwise as lines on stderr for CI logs."""

    def __init__(self, console: Console) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting", total=None)
        self._is_plain = not console.is_terminal
        self._started_s = self._printed_s = monotonic()

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, phase: str, done: int | None = None, total: int | None = None) -> None:
        """Show the step `phase`, with `done` of `total` parts if known. Lines are at least 10 s apart."""
        if self._is_plain:
            self._print(phase, done, total)
            return
        if done is None:  # a new step of unknown length; a bar keeps its total for ever
            self._bar.remove_task(self._task)
            self._task = self._bar.add_task(phase, total=None)
        else:
            self._bar.update(self._task, description=phase, completed=done, total=total)

    def _print(self, phase: str, done: int | None, total: int | None) -> None:
        now_s = monotonic()
        if now_s - self._printed_s < PLAIN_INTERVAL_S:
            return
        self._printed_s = now_s
        share = "" if done is None else f" {done}" if total is None else f" {done} of {total}"
        print(f"{now_s - self._started_s:5.0f} s  {phase}{share}", file=sys.stderr, flush=True)
