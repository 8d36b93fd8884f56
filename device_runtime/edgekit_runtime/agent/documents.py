"""The documents that a manager and a device exchange over MQTT, and the topics that carry them.

Each document travels as a DSSE envelope: the manager signs `desired`, the device all others.
A retained message is only a cache: the truth is in the manager's store and in the device's journal. So a
receiver accepts a document only if its signature is right, it names this device, and its number is higher
than that of the last one. Nothing here does input or output.

Source: docs/reference/fleet-protocol.json (AsyncAPI).
"""

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Final, Literal, TypeAlias

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.protocol.samples import SampleOrder, check_orders
from edgekit_runtime.protocol.streams import StreamOptions, check_fleet_streams
from edgekit_runtime.records import dataclass

PROTOCOL: Final = 1
MAX_DOCUMENT_BYTES: Final = 32 << 10
"""No document is larger; a larger one is refused before it is parsed. About 25 models of a device fit in."""

_COUNT: Final = Range(0, 1 << 53)
_CODE: Final = re.compile(r"(\S+:[0-9]+)/([0-9a-f]{64})/([A-Za-z0-9_-]{16,})", re.ASCII)

Kind: TypeAlias = Literal["desired", "reported", "hello", "event", "logs"]
ExecutionState: TypeAlias = Literal[
    "waiting",  # for its window, its jitter, or a condition that may come: `reason` says which
    "downloading",
    "installing",  # verify, write to the spare slot, self-test
    "trying",  # shadow or canary beside the old version, on real calls
    "succeeded",
    "refused",  # a check before the download: engine, class, disk, budget, a version rejected here
    "failed",
    "timed_out",
    "superseded",  # a newer desired document wants something else
]
ENDED: Final[frozenset[ExecutionState]] = frozenset(
    ("succeeded", "refused", "failed", "timed_out", "superseded")
)


def topic(device: str, kind: Kind) -> str:
    """Return the MQTT topic for one kind of documents of one device."""
    return f"ek/v1/d/{device}/{kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaOffer:
    """A small file that yields a package: a delta with an installed package, or a coded file alone.

    Attributes:
        from_sha256: digest of the manifest of the package that must be installed; empty for a coded file.
        path: the delta's path in the TUF repository.
        size_bytes, sha256: size and digest of the delta.
    """

    from_sha256: str
    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredModel:
    """The version of one model that the manager wants.

    Attributes:
        model: name of the model.
        version, manifest_sha256: the wanted package; the digest decides whether it is installed.
        path: the package's path in the TUF repository.
        size_bytes, sha256: size and digest of the package file.
        execution: names this attempt, unique in the fleet; the same name is never carried out twice.
        release, rollout: names to display.
        trial: how the new version is tried before the switch: not at all, beside the old version on copies of
            calls, or on a share of the calls.
        order: `new-first` loads the new version before it unloads the old one, which needs memory for both;
            `old-first` unloads first; `unloaded` unloads the old one at once, as it is not safe.
        priority: models with a higher priority are updated first.
        not_before_s: seconds after the receipt of the document at which the work may begin, drawn by the
            manager within the `spread_s` of the rollout, so that devices do not all download at once.
        timeout_s: the execution ends after this time, whatever it waits for.
        window: local time of day in which the device may switch, as `01:00-04:00`, or None for any time.
        is_return: the version was in use before and may be installed again, even if it was rejected here.
        deltas: smaller files from which the device can make the package, see `DeltaOffer`.
        key_id: id of the content key that encrypts package and deltas; empty for a plain package.
        wrapped_key: that key, wrapped for this device alone, in base64; empty for a plain package, and for a
            device without a decryption key.
        allows_plain: whether the plain package may replace an encrypted version.
    """

    model: str
    version: str
    manifest_sha256: str
    path: str
    size_bytes: int
    sha256: str
    execution: str
    release: str
    rollout: str
    trial: Literal["none", "shadow", "canary"] = "none"
    order: Literal["new-first", "old-first", "unloaded"] = "new-first"
    priority: int = 0
    not_before_s: float = 0.0
    timeout_s: float = 86_400.0
    window: str | None = None
    is_return: bool = False
    deltas: tuple[DeltaOffer, ...] = ()
    key_id: str = ""
    wrapped_key: str = ""
    allows_plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequest:
    """A request for the last lines of the logs of service and agent.

    Attributes:
        request: name of the request; a device answers each name once. Empty for no request.
        lines: number of lines.
    """

    request: str = ""
    lines: Annotated[int, Range(0, 1000)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """All that the manager wants of a device: models that are not named stay as they are.

    Attributes:
        device: its identifier; another device refuses the document.
        version: `$version`, higher with each change. A device refuses a lower version, and other content
            with an equal version.
        issued_at, expires_at: seconds since 1970. Once its document has expired, a device keeps its models
            and reports `stale`: somebody may withhold newer documents.
        epoch: number of the manager's lease. A device refuses a lower number than it has seen: that manager
            has been replaced.
        models: at most one entry per model.
        sequence: highest number of this device's documents that the manager has accepted. The device
            continues above it, even if it lost its journal and its clock is wrong.
        reconnect_s: width of the time window over which devices spread their reconnects.
        removed: models to remove from the device.
        notice: a sentence for the device's owner about a problem that the fleet noticed, or empty.
        streams: all streams that the fleet wants, by name: 16 at most, of 8 KiB together. Streams of the
            service's own configuration are not touched.
        settings: key -> value, see `protocol.device_settings`; an unknown key does not affect the others.
        logs: request for lines of the logs.
        samples: orders to store requests and send them; they have no effect if the device's owner forbids it.

    Raises:
        ValueError: there are too many streams, or over 16 orders, or two orders with the same identifier.
    """

    device: str
    version: Annotated[int, _COUNT]
    issued_at: Annotated[float, _COUNT]
    expires_at: Annotated[float, _COUNT]
    epoch: Annotated[int, _COUNT]
    models: tuple[DesiredModel, ...] = ()
    sequence: Annotated[int, _COUNT] = 0
    reconnect_s: float = 30.0
    removed: tuple[str, ...] = ()
    notice: str = ""
    streams: Mapping[str, StreamOptions] = field(default_factory=dict)
    samples: tuple[SampleOrder, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    logs: LogRequest = field(default_factory=LogRequest)

    def __post_init__(self) -> None:
        check_fleet_streams(self.streams)
        check_orders(self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Progress of one execution on the device.

    Attributes:
        execution, model, version: the same fields as in `DesiredModel`.
        state: see `ExecutionState`.
        reason: one sentence, empty while there is nothing to explain.
        code: short and stable, to group by, such as `disk-full` or `self-test`; empty without a reason.
        done_bytes: bytes downloaded so far.
        sent_bytes: bytes that the network carried to the device; bytes that came twice count twice.
    """

    execution: str
    model: str
    version: str
    state: ExecutionState
    reason: str = ""
    code: str = ""
    done_bytes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedModel:
    """One model as it is on the device.

    Attributes:
        model: its name.
        version, manifest_sha256: the package that is opened, or empty if none is.
        health: `unproven`, `healthy`, `rejected`, or `missing` where nothing is opened; `faulty` where it
            answers NaN or infinity to finite inputs.
        previous: version in the spare slot, or empty.
        because: why the opened version is not the desired version, or is faulty; one sentence, or empty.
        pinned: version at which somebody pinned the model on the device, or empty.
    """

    model: str
    version: str
    manifest_sha256: str
    health: Literal["unproven", "healthy", "rejected", "missing", "faulty"]
    previous: str = ""
    because: str = ""
    pinned: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """Counters of the service for one version since it was opened; the gates of a rollout judge them.

    Attributes:
        model, version: the version that the figures describe.
        requests: number of answered calls.
        failed: number of answered calls that failed.
        looked_at: number of answers in the drift statistics.
        not_finite: number of calls whose outputs had NaN or infinity although the inputs were finite.
        restarts: crashes of the process that runs the model.
        answer_s: time from arrival to answer, summed over the calls that did not fail.
        p50_ms, p99_ms: latency, or None before the first call; to be shown.
        energy_mj: mean energy a call, in millijoules, or None where it is not measured.
        agreement: mean agreement with the old version on the same inputs, 0..1, or None without a trial.
        compared: number of pairs of answers behind `agreement`.
        drift: largest population stability index of inputs and outputs, or None.
        gauges: further figures by name, such as `battery`: charge of the device's battery, 0..1.
    """

    model: str
    version: str
    requests: Annotated[int, _COUNT] = 0
    failed: Annotated[int, _COUNT] = 0
    looked_at: Annotated[int, _COUNT] = 0
    not_finite: Annotated[int, _COUNT] = 0
    restarts: Annotated[int, _COUNT] = 0
    answer_s: float = 0.0
    p50_ms: float | None = None
    p99_ms: float | None = None
    energy_mj: float | None = None
    agreement: float | None = None
    compared: Annotated[int, _COUNT] = 0
    drift: float | None = None
    gauges: Mapping[str, Annotated[float, Range(-1e12, 1e12)]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedStream:
    """A stream that the fleet wants, as the service of the device states it.

    Attributes:
        model: name of the model that answers.
        state: `waiting` is between two attempts to open the source; `failed` is for good; `missing` where no
            service runs it.
        fps: recent answers per second.
        error: what is wrong now, or empty.
    """

    model: str
    state: Literal["opening", "running", "waiting", "failed", "ended", "stopped", "missing"]
    fps: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedSamples:
    """Samples of one order, as the device states them.

    Attributes:
        state: `forbidden` by the device's owner; `missing` where no service serves the model.
        triggers: kind of trigger -> number of samples that it chose since the service was started.
        waiting, waiting_bytes: stored here, not yet sent.
        dropped: chosen samples that were not stored: too large, too many at once, or a full disk.
        error: which part of the order the device cannot carry out, or empty.
    """

    state: Literal["collecting", "ended", "forbidden", "missing"]
    triggers: Mapping[str, Annotated[int, _COUNT]] = field(default_factory=dict)
    waiting: Annotated[int, _COUNT] = 0
    waiting_bytes: Annotated[int, _COUNT] = 0
    dropped: Annotated[int, _COUNT] = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """All that the device states; it replaces what it stated before.

    Attributes:
        device: its identifier.
        sequence: number of this report; each report has a higher number, also after a restart.
        desired_version: `$version` of the document that the device holds, 0 before the first.
        status: `converged`: runs the desired version; `working`: on the way; `diverged`: runs another version
            and will not change it by itself; `stale`: has no valid document.
        because: one sentence for `diverged` and `stale`.
        models, figures: see their classes.
        executions: executions under way, and for each model the last one that has ended.
        facts: what selects and explains a device, such as `target`, `runtime`, `engines`, `free_bytes`,
            `battery`, `boot`; short strings. `live` is the URL of the device's live page, if it states it.
        streams: the streams that the fleet wants, by name.
        samples: id of an order -> its samples.
        settings: key of each setting of the fleet -> why it has no effect; empty if it has an effect.
    """

    device: str
    sequence: Annotated[int, _COUNT]
    desired_version: Annotated[int, _COUNT] = 0
    status: Literal["converged", "working", "diverged", "stale"]
    because: str = ""
    models: tuple[ReportedModel, ...] = ()
    executions: tuple[Execution, ...] = ()
    figures: tuple[ModelFigures, ...] = ()
    facts: Mapping[str, str]
    streams: Mapping[str, ReportedStream] = field(default_factory=dict)
    samples: Mapping[str, ReportedSamples] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a connection, and its last will; retained.

    The manager answers with `desired` if it has a newer one, and asks for a report that it lacks.

    Attributes:
        device: its identifier.
        sequence: number from the counter of `Reported`. Both messages of a connection have the same number;
            a message with a lower number than the newest is outdated.
        online: false in the last will, whose other fields do not count.
        desired_version: `$version` that the device holds, 0 before the first.
        reported: sequence of its last report since it was started, or 0.
        will_sha256: digest of the envelope of this connection's last will, or empty. The manager checks the
            will by this digest: verifying thousands of signatures at once takes seconds. An agent that ends
            publishes its will itself.
        instance: random name of the agent's run; if two names alternate, there is a copy of the device.
        address: the device's own address towards the broker, and its host name, to be shown.
        protocol: highest version of the protocol that the device understands.
        runtime: version of edgekit on the device.
    """

    device: str
    sequence: Annotated[int, _COUNT]
    online: bool = True
    desired_version: Annotated[int, _COUNT] = 0
    reported: Annotated[int, _COUNT] = 0
    will_sha256: str = ""
    instance: str = ""
    address: str = ""
    protocol: int = PROTOCOL
    runtime: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened on the device and that a later report would hide.

    Attributes:
        device, sequence: the same fields as in `Hello`.
        kind: short and stable, such as `fallback`, `attack`, `disk-full`.
        text: one sentence.
        at: seconds since 1970 by the clock of the device, which may be wrong.
    """

    device: str
    sequence: Annotated[int, _COUNT]
    kind: str
    text: str
    at: Annotated[float, _COUNT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """The answer to a `LogRequest`.

    Attributes:
        device, sequence: the same fields as in `Hello`.
        request: name of the request.
        source: `journal`; or `memory`, which lacks lines from before a restart.
        refusal: why there are no lines, or empty.
        text: the lines, the oldest first, without secrets: deflated (zlib), in base64.
    """

    device: str
    sequence: Annotated[int, _COUNT]
    request: str
    source: str = ""
    refusal: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentCode:
    """The address of the fleet and a secret with which a device can enrol once.

    As text it is `HOST:PORT/DIGEST/SECRET`.

    Attributes:
        address: `HOST:PORT` of the fleet's HTTPS server.
        authority_sha256: digest of the authority's certificate (DER), in hexadecimal digits. The device
            fetches that certificate by `GET /authority` (PEM), compares it, and only then sends the secret,
            over a connection that it has verified.
        secret: secret of this code; good for one device.
    """

    address: str
    authority_sha256: str
    secret: str

    def __str__(self) -> str:
        return f"{self.address}/{self.authority_sha256}/{self.secret}"

    @classmethod
    def parse(cls, text: str) -> "EnrolmentCode":
        """Return the code in a text `HOST:PORT/DIGEST/SECRET`.

        Raises:
            ConfigError: the text has another form.
        """
        match = _CODE.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"'{text[:100]}' is no code of a fleet, expected HOST:PORT/DIGEST/SECRET as"
                " `edgekit fleet enroll` prints it"
            )
        return cls(address=match[1], authority_sha256=match[2], secret=match[3])


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentRequest:
    """Body of `POST /enrol`, as JSON.

    Attributes:
        secret: secret of the enrolment code.
        csr: certificate signing request in PEM for the device's Ed25519 key. Its subject does not matter: the
            manager names the device.
        facts: the same field as in `Reported`; `target` is there if the device knows it.
        decryption_key: the device's P-256 public key in PEM, for which the fleet wraps content keys; empty
            if it has none. Only an enrolment sets it.
    """

    secret: str
    csr: str
    facts: Mapping[str, str]
    decryption_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalRequest:
    """Body of `POST /renew`, as JSON; the answer is an `Enrolment`.

    The CSR is signed with the key of the old certificate. That is the proof of identity; a replay yields
    nothing new.

    Attributes:
        device: its identifier.
        csr: certificate signing request in PEM.
    """

    device: str
    csr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageKey:
    """A key whose packages this fleet trusts.

    Attributes:
        name: name of the key, used as a file name.
        public_key: the public key in PEM.
    """

    name: str
    public_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    """All that a device needs to belong to a fleet; answer to `POST /enrol` and `POST /renew`, as JSON.

    Attributes:
        device: identifier of the device: the common name of its certificate and its user name at the broker.
        certificate: the device's certificate in PEM.
        authority: certificate in PEM of the authority that signs for the device, broker and HTTPS server.
        brokers: `HOST:PORT` each, to be tried in turn.
        web: `https://HOST:PORT` of `/authority`, `/enrol` and `/renew`.
        artifacts: URL of the TUF repository, `metadata/` and `targets/` below it.
        tuf_root: content of the TUF root metadata that is trusted first; its field `x-edgekit-manager-keys`
            names the keys whose `desired` is obeyed. A renewal does not change it.
        package_keys: keys whose packages are trusted; a renewal does not change them.
        target: target of this device's packages; its TUF role is `class-TARGET`.
    """

    device: str
    certificate: str
    authority: str
    brokers: tuple[str, ...]
    web: str
    artifacts: str
    tuf_root: str
    package_keys: tuple[PackageKey, ...]
    target: str
