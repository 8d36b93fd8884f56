"""Follows the fleet's orders of samples. The agent writes the orders to a file that the service reads.

A worker process reads the file itself, for its own model. If the owner of the device forbids samples, none
are stored, and unsent samples are deleted.
"""

import contextlib
import logging
import os
import time
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.dataclass_json import from_json
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.protocol.samples import SampleOrder, check_orders
from edgekit_runtime.records import dataclass
from edgekit_runtime.samples.folder import SAMPLES_FOLDER, SampleFolder
from edgekit_runtime.service.models.catalogue import Catalogue
from edgekit_runtime.service.options.config import SampleOptions
from edgekit_runtime.service.samples.sampler import ModelSampler, Writer
from edgekit_runtime.system.atomic_files import read_stamp

_MAX_FILE_BYTES: Final = 64 << 10
_SCAN_S: Final = 10.0
_DAY_S: Final = 86_400.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Orders:
    orders: tuple[SampleOrder, ...] = ()

    def __post_init__(self) -> None:
        check_orders(self.orders)


class FleetSamples:
    """Provides a sampler to each version of a model for which the fleet orders samples.

    Use it on the event loop only.
    """

    def __init__(self, options: SampleOptions, models: Catalogue, loop: AbstractEventLoop) -> None:
        """Create the samples without orders. `options` state the file of the orders."""
        self._options, self._models, self._loop = options, models, loop
        self._path = Path(options.file or os.devnull)
        self._folder = SampleFolder(self._path.parent / SAMPLES_FOLDER)
        self._stamp: tuple[int, ...] | None = None
        self._orders: tuple[SampleOrder, ...] = ()
        self._samplers: dict[str, ModelSampler] = {}
        self._writer = Writer()
        self._scan_s = 0.0

    def look(self) -> None:
        """Read the orders if their file changed, assign samplers to versions, and delete excess samples."""
        if not self._options.file:
            return
        stamp = read_stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            self._read()
        versions = [served for served in self._models.served() if served.loaded.remote is None]
        self._set_orders({served.metrics.model for served in versions})
        for served in versions:
            served.sampler = self._samplers.get(served.metrics.model)
        for sampler in self._samplers.values():
            sampler.refresh()
        now_s = time.monotonic()
        if now_s >= self._scan_s and self._folder.path.exists():
            self._scan_s = now_s + _SCAN_S
            lines = [line for sampler in self._samplers.values() for line in sampler.draws.lines]
            shares = {line.share: line.max_bytes for line in lines}
            self._writer.put(0, lambda: self._scan(shares))

    def keep(self, model: str, request_id: str | None) -> str:
        """Store a recent request as a sample, see `ModelSampler.keep`."""
        self._models.find(model, None)
        return self._samplers.get(model, self._make(model)).keep(request_id)

    def to_json(self) -> dict[str, JsonValue]:
        stated: dict[str, JsonValue] = {}
        for served in reversed(self._models.served()):  # the default version of each model comes last
            samples = served.to_json().get("samples")
            stated.update(samples if isinstance(samples, Mapping) else {})
        return {"allowed": self._options.allow, "orders": stated}

    def close(self) -> bool:
        """Finish the queued jobs. Return False if some are unfinished after at most 4 s."""
        return self._writer.close()

    def _set_orders(self, models: Set[str]) -> None:
        now = time.time()
        active: dict[str, list[SampleOrder]] = {}
        for order in self._orders if self._options.allow else ():
            if now < order.ends_at and order.model in models:
                active.setdefault(order.model, []).append(order)
        for model in active.keys() - self._samplers.keys():
            self._samplers[model] = self._make(model)
        for model, sampler in list(self._samplers.items()):
            sampler.set_orders(tuple(active.get(model, ())))
            if model not in active:
                del self._samplers[model]

    def _scan(self, shares: Mapping[tuple[str, str], int]) -> None:
        """Delete samples over the limits, and count the remaining ones.

        If samples are forbidden, delete all.
        """
        if not self._options.allow:
            if count := self._folder.clear():
                _logger.warning("samples are forbidden here: %d that waited are deleted", count)
            return
        oldest_at = time.time() - self._options.max_days * _DAY_S
        sizes: Counter[tuple[str, str]] = Counter()
        for sample in self._folder.trim(
            oldest_at=oldest_at, max_bytes=self._options.max_bytes, shares=shares
        ):
            sizes[sample.share] += sample.size_bytes
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._note_sizes, sizes)

    def _note_sizes(self, sizes: Mapping[tuple[str, str], int]) -> None:
        for sampler in self._samplers.values():
            sampler.note_sizes(sizes)

    def _make(self, model: str) -> ModelSampler:
        return ModelSampler(model, self._folder, self._options, self._writer, self._loop)

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                self._orders = from_json(_Orders, file.read(_MAX_FILE_BYTES), str(self._path)).orders
        except FileNotFoundError:
            self._orders = ()
        except (OSError, ConfigError) as cause:
            _logger.warning("the fleet's orders of samples stay as they are: %s", cause)
