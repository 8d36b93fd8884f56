"""The file of the streams that the fleet wants, which the service follows."""

import logging
from collections.abc import Mapping
from pathlib import Path

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import OutputError
from edgekit_runtime.protocol.streams import STREAMS_FILE, StreamOptions
from edgekit_runtime.system.atomic_files import Disk, write_atomically

_logger = logging.getLogger(__name__)


class StreamsFile:
    """Writes the file if it must change; only the user of agent and service can read it."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        """Read what an earlier run wrote into `folder`."""
        self._path, self._disk = folder / STREAMS_FILE, disk
        self._problem = ""
        try:
            self._content: bytes | None = self._path.read_bytes()
        except OSError:
            self._content = None

    def write(self, streams: Mapping[str, StreamOptions]) -> None:
        """Bring the file up to date; on a full disk the next call tries again."""
        content = encode_json({"streams": {name: options.to_json() for name, options in streams.items()}})
        if content == self._content or (self._content is None and not streams):
            return
        try:
            with write_atomically(self._path, mode=0o600, disk=self._disk) as file:
                file.write(content)
        except OutputError as error:
            if str(error) != self._problem:
                _logger.warning("the fleet's streams are not written: %s", error)
            self._problem = str(error)
        else:
            self._content, self._problem = content, ""
