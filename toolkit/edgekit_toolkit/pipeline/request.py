"""The request to `edgekit package`, and the phases of a run."""

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
    """The user's request for a package.

    Attributes:
        metric: The name of the metric, see `metrics.find_metric`.
        task: The task, see `proposal.decide_task`.
        batch: The batch size to fix, or None to keep the batch.
        dims: The sizes of free dimensions for measurements.
        fixed: The inputs to replace by constants, see `fix_inputs`.
        states: A dict from an output to the input that gets its value in the next run, see `name_states`.
        labels: A text with one class name per line, or None.
        labels_from_folders: Whether the class names are the sorted names of the folders of samples.
        threads: The number of engine threads for scores and measurements.
        thread_counts: The numbers of threads to compare. The package uses the fastest. If the tuple is
            empty, only `threads` is measured, and the package states no number of threads.
        search_s: The limit of the work of a search, in seconds of a nominal processor.
        search_shares: The number of searches that share the user's limit. Each of them gets `search_s`.
        backend: The name of the engine, such as `ort`. `auto` is only allowed for `search_engines`.
        variants: The maximum number of variants of the package, including the default one.
        also: The kinds from `forms.UNTIMED_KINDS` to include as further variants.
        strict: Whether the upper bound of the drop must be within the limit, in addition to the estimate.
        like: The only form to build besides the float model, or None to search.
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
        """The class names in `labels`. Empty without labels."""
        return () if self.labels is None else class_names(self.labels)

    def option_for(self, search_s: float) -> str:
        """Return the option that gives each search `search_s` seconds, such as `--search-seconds 60`."""
        return f"--search-seconds {math.ceil(search_s * self.search_shares)}"


class Phases:
    """Shows the phases of a run, and sums up their durations in `seconds` by name."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self.progress = progress

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.progress(name, None, None)
        begin = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin
