"""The documents that a manager and a device exchange over MQTT, and the topics that carry them.

Each document is signed in a DSSE envelope. The manager signs `desired`, and the device signs all others.

The messages that a broker retains are only a cache. The manager's store and the device's journal are
authoritative. A receiver accepts a document only if its signature is valid, it names this device, and its
number is higher than the last accepted number.

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
"""The maximum document size, enough for about 25 models. A larger document is refused unparsed."""

_COUNT: Final = Range(0, 1 << 53)
_CODE: Final = re.compile(r"(\S+:[0-9]+)/([0-9a-f]{64})/([A-Za-z0-9_-]{16,})", re.ASCII)

Kind: TypeAlias = Literal["desired", "reported", "hello", "event", "logs"]
ExecutionState: TypeAlias = Literal[
    "waiting",  # for its window, its jitter or a condition, see `reason`
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
    """Return the MQTT topic for documents of one kind from or to one device."""
    return f"ek/v1/d/{device}/{kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaOffer:
    """A delta or coded file from which the device can make a package.

    Attributes:
        from_sha256: digest of the manifest of the package that must be installed, or empty for a coded file.
        path: path of the delta in the TUF repository.
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
        version, manifest_sha256: version of the desired package, and digest of its manifest. The digest
            decides whether the package is installed.
        path: path of the package in the TUF repository.
        size_bytes, sha256: size and digest of the package file.
        execution: unique name of this update attempt. A device never repeats an attempt with the same name.
        release, rollout: names to display.
        trial: how the service tries the new version before it switches: `none` switches at once, `shadow`
            runs the new version on copies of calls, and `canary` lets it answer a share of the calls.
        order: `new-first` loads the new version before it unloads the old one, which needs memory for both.
            `old-first` unloads the old version first. `unloaded` unloads an unsafe old version immediately.
        priority: models with a higher priority are updated first.
        not_before_s: time from the receipt of the document to the earliest start of the work. The manager
            draws it at random within the `spread_s` of the rollout, so that devices do not all download at
            once.
        timeout_s: time after which the execution ends, even if it is still waiting.
        window: local times between which the device may switch, such as `01:00-04:00`, or None for any time.
        is_return: whether the version was in use before and may be installed even if this device rejected it.
        deltas: smaller files from which the device can make the package, see `DeltaOffer`.
        key_id: id of the content key of the package and its deltas, or empty if they are not encrypted.
        wrapped_key: the content key in base64, wrapped for this device alone. It is empty without encryption,
            and for a device without a decryption key.
        allows_plain: whether an unencrypted package may replace an encrypted version.
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
    """A request for the last lines of the logs of the service and the agent.

    Attributes:
        request: name of the request, or empty for no request. A device answers each name once.
        lines: number of lines.
    """

    request: str = ""
    lines: Annotated[int, Range(0, 1000)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """Everything that the manager wants of a device. Models that are not named do not change.

    Attributes:
        device: identifier of the device. Other devices refuse the document.
        version: `$version`, which rises with each change. A device refuses a lower number, and the same
            number with other content.
        issued_at, expires_at: seconds since 1970. After the document has expired, the device keeps its models
            and reports `stale`, because somebody may be withholding newer documents.
        epoch: number of the manager's lease. It rises when another manager takes over. A device refuses
            documents with a lower epoch.
        models: at most one entry per model.
        sequence: highest number of this device's documents that the manager has accepted. The device
            continues with higher numbers, even if it lost its journal and its clock is wrong.
        reconnect_s: period over which devices spread their reconnections.
        removed: names of the models to remove from the device.
        notice: a sentence for the device's owner about a problem that the fleet noticed, or empty.
        streams: a dict from name to options of every stream that the fleet wants: at most 16 streams and 8
            KiB in total. The fleet does not change the streams in the service's own configuration.
        settings: a dict from key to value, see `protocol.device_settings`. An unknown key does not affect the
            others.
        logs: request for lines of the logs.
        samples: orders to collect samples of requests. The device's owner can forbid them.

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
    """Progress of one update attempt on the device.

    Attributes:
        execution, model, version: the same fields as in `DesiredModel`.
        state: see `ExecutionState`.
        reason: one sentence, or empty if there is nothing to explain.
        code: a short and stable word for the reason, such as `disk-full` or `self-test`, or empty.
        done_bytes: number of bytes of the file that are downloaded.
        sent_bytes: number of bytes sent to the device. Bytes that were sent twice count twice.
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
    """The state of one model on the device.

    Attributes:
        model: name of the model.
        version, manifest_sha256: the active package, or empty if there is none.
        health: `unproven`, `healthy`, `rejected`, `missing` if no package is active, or `faulty` if the model
            answers NaN or infinity to finite inputs.
        previous: version in the spare slot, or empty.
        because: one sentence that explains why the active version is faulty or not the desired one, or empty.
        pinned: version to which somebody pinned the model on the device, or empty.
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
    """Counters of the service for one version since it was opened. The gates of a rollout use them.

    Attributes:
        model, version: the version that the figures describe.
        requests: number of answered calls.
        failed: number of answered calls that failed.
        looked_at: number of answers in the drift statistics.
        not_finite: number of calls whose outputs had NaN or infinity although the inputs were finite.
        restarts: number of crashes of the process that runs the model.
        answer_s: time from arrival to answer, summed over the calls that did not fail.
        p50_ms, p99_ms: percentiles of the latency for display, or None before the first call.
        energy_mj: mean energy per call, in millijoules, or None if it is not measured.
        agreement: mean agreement with the old version on the same inputs, 0..1, or None if there is no trial.
        compared: number of pairs of answers from which `agreement` is computed.
        drift: largest population stability index of the inputs and outputs, or None.
        gauges: a dict from name to value of other figures, such as `battery`, the charge of the device's
            battery, 0..1.
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
    """A stream that the fleet wants, as reported by the service of the device.

    Attributes:
        model: name of the model that answers.
        state: `waiting` between two attempts to open the source, `failed` after the last attempt, `missing`
            if no service runs the stream.
        fps: recent answers per second.
        error: the current problem, or empty.
    """

    model: str
    state: Literal["opening", "running", "waiting", "failed", "ended", "stopped", "missing"]
    fps: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedSamples:
    """The samples of one order, as reported by the device.

    Attributes:
        state: `forbidden` if the device's owner forbids samples, `missing` if no service serves the model.
        triggers: a dict from each kind of trigger to the number of samples that it chose since the service
            started.
        waiting, waiting_bytes: number and size of the samples that are stored on the device and not yet sent.
        dropped: number of chosen samples that were not stored, for example because the disk was full.
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
    """The complete state of a device. Each report replaces the report before.

    Attributes:
        device: identifier of the device.
        sequence: number of this report. The numbers always rise, also after a restart.
        desired_version: `$version` of the document that the device follows, or 0 before the first document.
        status: `converged` if the device runs the desired versions, `working` during an update, `diverged` if
            the device runs another version and will not try again by itself, `stale` without a valid
            document.
        because: one sentence that explains `diverged` or `stale`.
        models, figures: see `ReportedModel` and `ModelFigures`.
        executions: running executions, and the last finished execution of each model.
        facts: a dict from name to value of facts about the device, such as `target`, `runtime`, `engines`,
            `free_bytes`, `battery`, `boot`. `live` is the URL of the device's live page.
        streams: a dict from name to state of each stream that the fleet wants.
        samples: a dict from the id of an order to its samples.
        settings: a dict from the key of each desired setting to the reason why the setting has no effect. The
            reason is empty if the setting has an effect.
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
    """First message of a connection, and also its last will. The broker retains it.

    The manager answers with `desired` if it has a newer document, and asks for a report if the last report
    did not arrive.

    Attributes:
        device: identifier of the device.
        sequence: number from the same counter as in `Reported`. The first message and the last will of a
            connection have the same number. Messages with lower numbers are outdated.
        online: False in the last will. The fields after this one then have no meaning.
        desired_version: `$version` of the document that the device follows, or 0 before the first document.
        reported: sequence of the last report since the agent was started, or 0.
        will_sha256: digest of the envelope of this connection's last will, or empty. The manager checks the
            will by this digest, which is faster than to verify its signature.
        instance: random name of this run of the agent. Two alternating names reveal a copy of the device.
        address: the IP address and host name of the device, for display.
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
    """Something that happened on the device and that a later report would not show.

    Attributes:
        device, sequence: the same fields as in `Hello`.
        kind: a short and stable word, such as `fallback`, `attack` or `disk-full`.
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
        source: `journal`, or `memory` for the lines since the last start of the processes.
        refusal: why there are no lines, or empty.
        text: the lines in order of time, with secrets removed, compressed with zlib and encoded in base64.
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
        authority_sha256: SHA-256 of the authority's certificate (DER), in hexadecimal. The device fetches the
            certificate by `GET /authority` (PEM) and compares its digest. It then sends the secret over a
            connection that it has verified with this certificate.
        secret: secret of this code. It is valid for one device.
    """

    address: str
    authority_sha256: str
    secret: str

    def __str__(self) -> str:
        return f"{self.address}/{self.authority_sha256}/{self.secret}"

    @classmethod
    def parse(cls, text: str) -> "EnrolmentCode":
        """Parse a text of the form `HOST:PORT/DIGEST/SECRET`.

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
        csr: certificate signing request in PEM for the device's Ed25519 key. Its subject is ignored, because
            the manager chooses the name of the device.
        facts: the same field as in `Reported`. It includes `target` if the device knows its target.
        decryption_key: the device's P-256 public key in PEM, or empty if it has none. The fleet wraps content
            keys for this key. Only an enrolment sets it.
    """

    secret: str
    csr: str
    facts: Mapping[str, str]
    decryption_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalRequest:
    """Body of `POST /renew`, as JSON. The answer is an `Enrolment`.

    The CSR is signed with the key of the old certificate, which proves the identity of the device.

    Attributes:
        device: identifier of the device.
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
    """All that a device needs to belong to a fleet: the answer to `POST /enrol` and `POST /renew`, as JSON.

    Attributes:
        device: identifier of the device, which is the common name of its certificate and its user name at the
            broker.
        certificate: certificate of the device in PEM.
        authority: PEM certificate of the authority that certifies the device, brokers and HTTPS server.
        brokers: addresses of the brokers as `HOST:PORT`, in the order in which to try them.
        web: `https://HOST:PORT` of the server for `/authority`, `/enrol` and `/renew`.
        artifacts: URL of the TUF repository, which contains `metadata/` and `targets/`.
        tuf_root: content of the TUF root metadata that the device trusts first. Its field
            `x-edgekit-manager-keys` names the keys that may sign `desired`. A renewal does not change it.
        package_keys: keys whose packages the device trusts. A renewal does not change them.
        target: target of this device's packages. The TUF role for them is `class-TARGET`.
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
