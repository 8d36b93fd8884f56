"""Runs the streams that the fleet orders. The agent writes them to a file that the service reads.

When the file changes, new streams are started, changed streams are restarted, and removed streams are
stopped. If the file is invalid, all streams continue.

Streams from the configuration and from clients are not changed. If one of them has the same name, the stream
of the fleet waits until the name is free.
"""

import logging
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.dataclass_json import from_json
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.protocol.streams import StreamOptions, hide_password
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.streams.sinks import SINKS
from edgekit_runtime.service.streams.source_kinds import SOURCES, find_kind
from edgekit_runtime.service.streams.streams import Streams
from edgekit_runtime.system.atomic_files import read_stamp

_MAX_FILE_BYTES: Final = 64 << 10
_MAX_QUEUED: Final = 4096  # answers of about 1 kB that wait for a sink which is away

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _File:
    streams: Mapping[str, StreamOptions] = field(default_factory=dict)


class FleetStreams:
    """Starts, stops and replaces the streams in a file. It runs on the event loop."""

    def __init__(self, path: Path, streams: Streams, *, allows_files: bool) -> None:
        """Create the object without starting streams.

        `path` is the file of the agent, which need not exist. For `allows_files`, see `FleetStreamOptions`.
        """
        self._path, self._streams, self._allows_files = path, streams, allows_files
        self._stamp: tuple[int, ...] = ()
        self._desired: Mapping[str, StreamOptions] = {}
        self._running: dict[str, StreamOptions] = {}
        self._faults: dict[str, str] = {}

    def look(self) -> None:
        """Read the file if it has changed, and start streams whose names are free. Failures are logged."""
        stamp = read_stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            self._read()
        for name, options in self._desired.items():
            if not (name in self._running or name in self._faults or self._streams.has(name)):
                try:
                    self._check(options)
                    self._streams.add(name, options)
                    self._running[name] = options
                except ConfigError as error:
                    self._faults[name] = hide_password(str(error))
                    _logger.warning("stream %s of the fleet: %s", name, self._faults[name])

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return the model, state, answers per second and error of each ordered stream, by name."""
        entries = {}
        for name, options in sorted(self._desired.items()):
            error = "the service's configuration or a client has a stream of this name"
            entry = {"model": options.model, "state": "failed", "fps": 0.0, "error": error}
            if name in self._running:
                stream = self._streams.find(name)
                entry |= {"state": stream.state, "fps": round(stream.fps, 2), "error": stream.error}
            elif name in self._faults:
                entry["error"] = self._faults[name]
            entries[name] = entry
        return entries

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                content = from_json(_File, file.read(_MAX_FILE_BYTES), str(self._path))
        except FileNotFoundError:
            content = _File()
        except (OSError, ConfigError) as cause:
            _logger.warning("the fleet's streams stay as they are: %s", hide_password(str(cause)))
            return
        for name, options in list(self._running.items()):
            if content.streams.get(name) != options:
                del self._running[name]
                self._streams.remove(name)
        self._desired, self._faults = content.streams, {}

    def _check(self, options: StreamOptions) -> None:
        kinds = [find_kind(SOURCES, options.source), *(find_kind(SINKS, sink) for sink in options.sinks)]
        if any(kind.writes_files for kind in kinds) and not self._allows_files:
            raise ConfigError(
                "it can write files: this device's owner allows that by allows_files = true in"
                " [fleet_streams] of the service's configuration"
            )
        if options.max_pixels > self._streams.max_pixels:
            raise ConfigError(
                f"max_pixels is {options.max_pixels}, this device's owner allows {self._streams.max_pixels}"
            )
        if options.max_queued > _MAX_QUEUED:
            raise ConfigError(f"max_queued is {options.max_queued}, a fleet may ask for {_MAX_QUEUED}")
