"""The progress bar of a long command."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


class ProgressBar:
    """A bar that says what is done now, on a terminal only."""

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

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, what: str, done: int | None = None, total: int | None = None) -> None:
        """Show what is done now, how much of it is done and how much there is."""
        if done is None:  # a new step of unknown length; a bar keeps its total for ever
            self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=None)
        else:
            self._bar.update(self._task, description=what, completed=done, total=total)
