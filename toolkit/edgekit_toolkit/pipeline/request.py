"""The request to `edgekit package`, and its phases, shown and timed."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.tasks.answerer import class_names
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.selection.budget import Budget
from edgekit_toolkit.targets.spec import Target

# Called with the present step, how much of it is done, and its total.
Progress = Callable[[str, int | None, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The user's request for one package.

    Attributes:
        metric: name as for `metrics.find_metric`.
        task: what the outputs mean, as for `proposal.decide_task`.
        batch: fixed batch, or None to leave it unchanged.
        dims: sizes of free dimensions for measuring.
        fixed: inputs that become constants, as for `fix_inputs`.
        states: output -> input of the next run, as for `name_states`.
        labels: text with one class name a line, or None.
        labels_from_folders: whether the class names are the sorted names of the samples' folders.
        threads: threads of the engine while judging and measuring.
        thread_counts: numbers of threads to time; the package states the fastest. Empty to state none.
        search_s: limit of the work of a search, in seconds of a nominal processor.
        search_shares: number of searches that share the command line's limit; each gets `search_s`.
        backend: name of the engine, such as `ort`; `auto` only for `engine_tournament.search_engines`.
        variants: most variants that the package carries, the default included, at least 1.
        also: kinds of `forms.UNTIMED_KINDS` that the package carries as further variants.
        strict: whether the upper end of the drop's interval must keep the limit, not only the estimate.
        like: the only form that is made and may be chosen; None to search.
    """

    model: Path
    target: Target
    budget: Budget
    name: str
    version: str
    calibration: Path | None = None
    evaluation: Path | None = None
    metric: str = "auto"
    task: str = "auto"
    batch: int | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, JsonValue] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    labels: str | None = None
    labels_from_folders: bool = False
    preprocessing: Mapping[str, Any] | None = None
    threads: int = 2
    thread_counts: tuple[int, ...] = ()
    search_s: float = 60.0
    search_shares: int = 1
    backend: str = "ort"
    variants: int = 1
    also: tuple[str, ...] = ()
    strict: bool = False
    like: Form | None = None

    @property
    def class_names(self) -> tuple[str, ...]:
        """The class names in `labels`; empty without labels."""
        return () if self.labels is None else class_names(self.labels)

    def option_for(self, search_s: float) -> str:
        """Return the option, such as `--search-seconds 60`, that gives each search `search_s` of work."""
        return f"--search-seconds {math.ceil(search_s * self.search_shares)}"


class Phases:
    """Shows the phases of a run, and adds up their times in `seconds` by name."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self.progress = progress

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.progress(name, None, None)
        begin = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin
