"""What the fleet wants in addition to models: streams, samples, settings and log lines.

For example:

    document                   settings {"month-mb": "50", "power-w": "12"}
                               logs {"request": "r1", "lines": 200}
    agent                      transfers up to 50 MB a month, and writes power-w to a file for the service
    report                     {"month-mb": "", "power-w": "this device's owner has fixed it"}
    document of kind `logs`    the last log lines, without secrets, as the only answer to request r1

None of these fields can name a file or a command.
"""

import base64
import logging
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.agent.documents import Desired, LogRequest, Logs
from edgekit_runtime.agent.sample_uploads import SampleUploads
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.client.control import read_service_log, read_service_settings
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import OutputError
from edgekit_runtime.protocol.device_settings import SETTINGS, find_fault
from edgekit_runtime.protocol.rest import SETTINGS_FILE
from edgekit_runtime.protocol.samples import SAMPLES_FILE
from edgekit_runtime.protocol.streams import STREAMS_FILE
from edgekit_runtime.system.atomic_files import Disk, write_atomically
from edgekit_runtime.system.recent_log import mask_secrets, read_journal, read_recent

FIXED: Final = "this device's owner has fixed it"
_MAX_TEXT_BYTES: Final = 20_000  # of a document of 32 KiB, after two codings in base64
_ASK_S: Final = 10.0

_logger = logging.getLogger(__name__)


class WishFile:
    """A file that tells the service what the fleet wants.

    Only the user that runs the agent and the service can read the file.
    """

    def __init__(self, path: Path, field: str, disk: Disk) -> None:
        """Read what an earlier run wrote; `field` names the document's field that the file holds."""
        self._path, self._field, self._disk = path, field, disk
        self._problem = ""
        try:
            self._content: bytes | None = path.read_bytes()
        except OSError:
            self._content = None

    def write(self, wishes: Mapping[str, Any] | Sequence[Any]) -> None:
        """Replace the file if `wishes` have changed. A failure is logged, and the next call tries again."""
        content = encode_json({self._field: wishes})
        if content == self._content or (self._content is None and not wishes):
            return
        try:
            with write_atomically(self._path, mode=0o600, disk=self._disk) as file:
                file.write(content)
        except OutputError as error:
            if str(error) != self._problem:
                _logger.warning("the fleet's %s are not written: %s", self._field, error)
            self._problem = str(error)
        else:
            self._content, self._problem = content, ""


class Wishes:
    """The streams and samples that the fleet wants from the service, stored in files in the agent's folder.

    Attributes:
        uploads: decides when samples are sent.
    """

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._streams = WishFile(folder / STREAMS_FILE, "streams", disk)
        self._orders = WishFile(folder / SAMPLES_FILE, "orders", disk)
        self.uploads = SampleUploads(folder)

    def write(self, desired: Desired) -> None:
        """Write the streams and the orders of samples to their files, if they have changed."""
        self._streams.write({name: options.to_json() for name, options in desired.streams.items()})
        self._orders.write(to_plain(desired.samples))


class DeviceSettings:
    """The settings that the owner allows the fleet to change."""

    def __init__(self, folder: Path, disk: Disk, fixed: Mapping[str, str], *, is_allowed: bool) -> None:
        """Follow nothing yet.

        Args:
            folder: folder of the file for the service.
            disk: writes it.
            fixed: key -> value that the owner has fixed.
            is_allowed: whether the owner takes settings of the fleet at all.
        """
        self._file = WishFile(folder / SETTINGS_FILE, "settings", disk)
        self._fixed, self._is_allowed = fixed, is_allowed
        self._desired: Mapping[str, str] | None = None
        self._service: Mapping[str, str] = {}
        self._service_s = float("-inf")
        self._default_level = logging.getLogger("edgekit_runtime").level

    def follow(self, desired: Mapping[str, str]) -> None:
        """Apply the fleet's settings, a dict from key to value, and write the file for the service.

        If the disk is full, the settings are applied, and the next call writes the file.
        """
        accepted = {
            key: value
            for key, value in desired.items()
            if self._is_allowed and not find_fault(key, value) and SETTINGS[key].reader != "agent"
        }
        self._file.write(accepted)
        if desired == (self._desired or {}):
            return
        self._desired, self._service_s = dict(desired), float("-inf")
        level = self.find("log-level")
        logging.getLogger("edgekit_runtime").setLevel(level.upper() if level else self._default_level)

    def find(self, key: str) -> str:
        """Return the value of a setting, or an empty string if it has no value.

        The owner's value takes precedence. An invalid or forbidden value of the fleet is ignored.
        """
        if key in self._fixed:
            return self._fixed[key]
        value = (self._desired or {}).get(key, "")
        return value if self._is_allowed and value and not find_fault(key, value) else ""

    def find_number(self, key: str) -> float | None:
        text = self.find(key)
        return float(text) if text else None

    def list_states(self, socket_path: Path | None, now_s: float) -> dict[str, str]:
        """Return a dict from the key of each desired setting to the reason why it has no effect.

        The reason is empty if the setting has an effect. `socket_path` is the socket of the service, or None.
        `now_s` is the time of the monotonic clock.
        """
        desired = self._desired or {}
        if any(key in SETTINGS and SETTINGS[key].reader != "agent" for key in desired) and (
            now_s - self._service_s >= _ASK_S
        ):
            self._service_s = now_s
            self._service = {} if socket_path is None else read_service_settings(socket_path)
        return {key: self._find_problem(key, value) for key, value in sorted(desired.items())}

    def _find_problem(self, key: str, value: str) -> str:
        if not self._is_allowed:
            return "this device's owner takes no settings of the fleet"
        if fault := find_fault(key, value):
            return fault
        if key in self._fixed:
            return FIXED
        if SETTINGS[key].reader == "service":
            return str(self._service.get(key, "no service heeds it yet"))[:200]
        return str(self._service.get(key, ""))[:200]


class DeviceLogs:
    """Answers each request for log lines once, on a separate thread, because reading may take seconds."""

    def __init__(self, device: str, answered: str, *, is_allowed: bool) -> None:
        """Answer nothing yet; `answered` is the last request of `device` that was answered."""
        self._device, self._answered, self._is_allowed = device, answered, is_allowed
        self._thread: threading.Thread | None = None
        self._answer: Logs | None = None

    def take(self, request: LogRequest, socket_path: Path | None) -> Logs | None:
        """Begin to answer a new request, or return an answer that is ready. Each answer is returned once.

        `socket_path` is the socket of the service, or None. Its log is read if there is no system journal.
        """
        if self._thread is not None:
            if self._thread.is_alive():
                return None
            self._thread, answer, self._answer = None, self._answer, None
            return answer
        if not request.request or request.request == self._answered:
            return None
        self._answered = request.request
        self._thread = threading.Thread(target=self._read, args=(request, socket_path), daemon=True)
        self._thread.start()
        return None

    def _read(self, request: LogRequest, socket_path: Path | None) -> None:
        answer = Logs(device=self._device, sequence=0, request=request.request)
        if not self._is_allowed:
            self._answer = replace(answer, refusal="this device's owner does not show its logs to the fleet")
            return
        source, lines = "journal", read_journal(request.lines)
        if not lines:
            service = [] if socket_path is None else read_service_log(socket_path, request.lines)
            own = [f"agent: {line}" for line in read_recent(request.lines)]
            source, lines = "memory", [*(f"service: {line}" for line in service), *own]
        self._answer = replace(answer, source=source, text=pack_lines(mask_secrets(lines), request.lines))


def pack_lines(lines: Sequence[str], count: int) -> str:
    """Compress the last lines of the service and the agent with zlib, and encode them in base64.

    The last 2 · `count` lines are packed, or fewer if the result would exceed 20,000 bytes.
    """
    recent = list(lines)[-2 * count :]
    while True:
        packed = base64.b64encode(zlib.compress("\n".join(recent).encode(), 9))
        if len(packed) <= _MAX_TEXT_BYTES or not recent:
            return packed.decode()
        del recent[: max(1, len(recent) // 8)]


def unpack_lines(text: str, max_bytes: int) -> str:
    """Return the first `max_bytes` bytes of the text that `pack_lines` packed.

    Raises:
        ValueError: `text` is malformed.
    """
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), max_bytes)
    except zlib.error as cause:
        raise ValueError(str(cause)) from cause
    return data.decode(errors="replace").replace("\0", "\ufffd")
