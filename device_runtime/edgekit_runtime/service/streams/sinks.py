"""The kinds of sinks to which a stream can send its answers."""

import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.protocol.streams import StreamOptions, hide_password
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.streams.sink import QueuedSink, Sink
from edgekit_runtime.service.streams.source_kinds import AddressKind, find_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkKind(AddressKind):
    """A kind of sink.

    Attributes:
        open: Creates a sink from its address, the name of the stream and its options. The sink connects
            later.
    """

    open: Callable[[str, str, StreamOptions], Sink]


class _Output(Sink):
    def write(self, lines: Sequence[bytes]) -> None:
        _write_all(1, b"".join(lines))


class _RotatedFile(Sink):
    """A file of lines with rotation. PATH.1 to PATH.N are the earlier files, the newest first."""

    def __init__(self, text: str, _name: str, options: StreamOptions) -> None:
        self._path, self._options = Path(text.removeprefix("file:")), options
        self._descriptor: int | None = None
        if self._path.exists() and not self._path.is_file():
            raise ConfigError(
                f"sink {text[:200]!r} is no regular file; for the output of the service: stdout"
            )

    def write(self, lines: Sequence[bytes]) -> None:
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A pipe that has come since would keep the thread until somebody reads it.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            self._descriptor = os.open(self._path, flags, 0o640)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise OSError(f"{self._path} is no regular file")
        size_bytes = status.st_size
        try:
            _write_all(self._descriptor, b"".join(lines))
        except OSError:
            os.ftruncate(self._descriptor, size_bytes)  # no half a line, for they are written again
            raise
        if size_bytes + sum(map(len, lines)) >= self._options.max_file_bytes:
            self.close()
            self._rotate()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _rotate(self) -> None:
        paths = [self._path, *(Path(f"{self._path}.{n}") for n in range(1, self._options.max_files))]
        for newer, older in reversed(list(itertools.pairwise(paths))):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        if len(paths) == 1:
            self._path.unlink(missing_ok=True)


def _open_http(text: str, _name: str, _options: StreamOptions) -> Sink:
    from edgekit_runtime.service.streams.http_sink import HttpSink

    return HttpSink(text)


def _open_mqtt(text: str, name: str, _options: StreamOptions) -> Sink:
    from edgekit_runtime.service.streams.mqtt_sink import MqttSink

    return MqttSink(text, name)


SINKS: Final = (
    SinkKind(form="stdout", matches=lambda text: text == "stdout", open=lambda *_: _Output()),
    SinkKind(
        form="mqtt://HOST[:PORT][/TOPIC] or mqtts://…",
        matches=lambda text: text.startswith(("mqtt://", "mqtts://")),
        open=_open_mqtt,
    ),
    SinkKind(
        form="http://… or https://…",
        matches=lambda text: text.startswith(("http://", "https://")),
        open=_open_http,
    ),
    SinkKind(
        form="file:PATH",
        matches=lambda text: text.startswith("file:"),
        open=_RotatedFile,
        writes_files=True,
    ),
)


def open_sink(text: str, name: str, options: StreamOptions) -> QueuedSink:
    """Return a sink for the stream `name`. It connects when it gets the first answer.

    Raises:
        ConfigError: `text` is not the address of a sink.
    """
    kind = find_kind(SINKS, text)
    try:
        sink = kind.open(text, name, options)
    except ValueError as cause:  # of an address
        raise ConfigError(f"sink is {hide_password(text)[:60]!r}: {cause}") from cause
    return QueuedSink(text, sink, options.max_queued)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
