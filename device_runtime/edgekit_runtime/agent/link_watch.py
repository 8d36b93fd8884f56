"""The device's side of the connection to the broker.

`Presence` publishes the hello messages. `LinkWatch` stores the status and renews the certificate.
"""

import contextlib
import hashlib
import os
import queue
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from edgekit_runtime import __version__
from edgekit_runtime.agent.documents import Hello, Kind
from edgekit_runtime.agent.journal import Journal
from edgekit_runtime.agent.membership import (
    ENROLMENT,
    LinkProblem,
    LinkStatus,
    Membership,
    read_link_status,
    write_link_status,
)
from edgekit_runtime.agent.mqtt_link import LinkMessage
from edgekit_runtime.agent.signing import seal
from edgekit_runtime.errors import OutputError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import Disk, read_stamp

_FIRST_RENEWAL_S: Final = 120.0  # so that a device that is on for minutes a day renews its certificate too
_RENEWAL_S: Final = 21_600.0
_TOLERATED_S: Final = 60.0  # a clock can be set back by this without harm
_FIRST_ASK_S: Final = 5.0  # after a refusal, doubled each time


@dataclass(frozen=True, slots=True)
class Renewal:
    """Result of an attempt to renew the certificate.

    Attributes:
        is_new: whether there is a new certificate.
        problem: why the fleet refuses, or empty.
    """

    is_new: bool = False
    problem: str = ""


Renewer: TypeAlias = Callable[[bool, float], Renewal]
"""Renews the certificate if it is due, or at once if the flag is set. The float is `TrustedTime.stated_s`."""


@dataclass(slots=True)
class RefusalPause:
    """The pause between requests to the web server while the brokers refuse this device.

    The pause continues after a renewal, because the brokers may also refuse the new certificate.

    Attributes:
        questions: number of requests to the web server since the last connection.
        ends_s: end of the pause, on the monotonic clock.
    """

    questions: int = 0
    ends_s: float = 0.0

    def begin(self, now_s: float) -> None:
        """Count a request, and begin a pause of 5 s. Each further pause is twice as long, up to 6 h."""
        self.ends_s = now_s + min(_FIRST_ASK_S * 2.0**self.questions, _RENEWAL_S)
        self.questions += 1


class DocumentLink(Protocol):
    """A link that carries documents to and from the agent, see `MqttLink`."""

    received: queue.SimpleQueue[LinkMessage]
    will: bytes
    reconnect_s: float

    @property
    def problem(self) -> LinkProblem | None: ...
    @property
    def is_connected(self) -> bool: ...  # see `MqttLink`

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def put(self, kind: Kind, payload: bytes, *, key: str = "", is_retained: bool = False) -> None: ...


class Presence:
    """Publishes the hello messages of this device, and sets the last will of each connection.

    Attributes:
        own_address: address of this device on its connection to the broker.
        last_report: number of the last report that was passed to the link.
    """

    def __init__(self, member: Membership, journal: Journal, link: DocumentLink) -> None:
        self._member, self._journal, self._link = member, journal, link
        self._instance = secrets.token_hex(8)
        self._sequence = 0
        self._will = b""  # of this connection
        self.own_address = ""
        self.last_report = 0

    def prepare(self) -> None:
        """Choose the sequence number of the next hello, and set the last will of the next connection."""
        self.renew_number()
        device = self._member.enrolment.device
        will = Hello(device=device, sequence=self._sequence, online=False, runtime=__version__)
        self._link.will = seal(will, "hello", self._member.key)

    def renew_number(self) -> None:
        self._sequence = self._journal.next_sequence()

    def publish_hello(self, desired_version: int, *, is_new_connection: bool) -> None:
        """Publish a hello, and set the last will of the next connection.

        Args:
            desired_version: `$version` of the document that the device follows, or 0 without a document.
            is_new_connection: whether this is the first hello of a connection.
        """
        if is_new_connection:
            self._will = self._link.will
        hello = Hello(
            device=self._member.enrolment.device,
            sequence=self._sequence,
            desired_version=desired_version,
            reported=self.last_report,
            will_sha256=hashlib.sha256(self._will).hexdigest(),
            instance=self._instance,
            address=f"{self.own_address} ({os.uname().nodename})"[:100],
            runtime=__version__,
        )
        self._link.put("hello", seal(hello, "hello", self._member.key), is_retained=True)
        self.prepare()

    def publish_will(self) -> None:
        """Publish the last will, because the broker publishes it only after a lost connection."""
        if self._will and self._link.is_connected:
            self._link.put("hello", self._will, is_retained=True)


class LinkWatch:
    """Writes the connection status for `edgekit-device fleet status`, and renews the certificate."""

    def __init__(
        self,
        member: Membership,
        folder: Path,
        link: DocumentLink,
        disk: Disk,
        *,
        renew: Renewer | None,
        pause: RefusalPause | None,
        now_s: float,
    ) -> None:
        """Read the state that the last agent wrote; for `renew` and `pause` see `Agent`."""
        self._member, self._folder, self._link, self._disk = member, folder, link, disk
        self._renew, self._pause = renew, pause or RefusalPause()
        self._renewal_s = now_s + _FIRST_RENEWAL_S
        self._refusal = ""  # of the web server
        self._status = read_link_status(folder) or LinkStatus()

    def note_link(self, now: float) -> None:
        """Write the status if the connection or its problem has changed. `now` is in seconds since 1970."""
        is_connected, problem = self._link.is_connected, self._link.problem
        text = "" if problem is None else problem.text
        if is_connected:
            self._pause.questions = 0
        if problem is None or not problem.is_refusal:
            self._refusal = ""
        elif self._refusal:
            text = f"{text} ({self._refusal})"
        status = self._status
        is_new = is_connected != status.is_connected
        is_of_wrong_clock = status.since_at > now + _TOLERATED_S
        if is_new or is_of_wrong_clock or text != status.problem:
            since_at = now if is_new or is_of_wrong_clock or not status.since_at else status.since_at
            self._write(LinkStatus(is_connected=is_connected, since_at=since_at, problem=text))

    def note_end(self, now: float) -> None:
        """Write that the agent has stopped. `now` is in seconds since 1970."""
        self._write(LinkStatus(since_at=now if self._status.is_connected else self._status.since_at))

    def has_renewed(self, now_s: float, stated_s: float) -> bool:
        """Renew the certificate if necessary, and return whether there is a new certificate.

        The certificate is checked every 6 h, and when the broker refuses the device. The result is also True
        after a new enrolment.

        Args:
            now_s: time of the monotonic clock.
            stated_s: see `TrustedTime`.
        """
        if read_stamp(self._member.folder / ENROLMENT) != self._member.stamp:
            self._pause.ends_s = 0.0
            return True
        problem = self._link.problem
        is_refused = problem is not None and problem.is_refusal and now_s >= self._pause.ends_s
        if self._renew is None or not (now_s >= self._renewal_s or is_refused):
            return False
        self._renewal_s = now_s + _RENEWAL_S
        renewal = self._renew(is_refused, stated_s)
        if is_refused:
            self._refusal = renewal.problem
            self._pause.begin(now_s)
        return renewal.is_new

    def _write(self, status: LinkStatus) -> None:
        self._status = status
        with contextlib.suppress(OutputError):  # as on a full disk, which must not stop the agent
            write_link_status(self._folder, status, self._disk)
