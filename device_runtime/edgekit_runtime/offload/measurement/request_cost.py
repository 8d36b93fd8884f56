"""Measures the time that a request takes in addition to the link and the models.

This includes the choice of a plan, checks, encoding, threads, HTTP, and the evaluation of the reply.
"""

import contextlib
import datetime
import hashlib
import ipaddress
import math
import random
import socket
import ssl
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import EdgekitError, TransportError
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_options import OffloadOptions
from edgekit_runtime.offload.offload_plan import LOCAL, OffloadPlan, PlanCosts
from edgekit_runtime.offload.offload_server import NO_MODEL
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.canonical_zip import Member
from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.package.manifest_entries import Artifact, BackendChoice
from edgekit_runtime.package.package_file import PackageFile
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.processor_speed import MOST_WAITING, SpeedGate, begin_anywhere
from edgekit_runtime.tensors import Array, TensorSpec

_LEAST_BYTES: Final = 4 << 10
_WARM_UP_REQUESTS: Final = 3
_LEAST_REQUESTS: Final = 5
_LEAST_PRECISE: Final = 20  # values
_PRECISION: Final = 0.01
_WITHIN_S: Final = 20e-6  # precise enough, as a request also takes milliseconds on the link
_LARGE_REQUESTS: Final = 3  # few, as their processor time varies little
_LARGE_BYTES: Final = 1 << 20
_UNUSED_PORT: Final = 1
_READ_BYTES: Final = 256 << 10
_REQUEST_LIMIT_S: Final = 10.0
_OUTPUTS: Final = b'{"model_name":"m","outputs":[{"name":"y","datatype":"FP32","shape":[1],"data":[0.0]}]}'
_LOOPBACK: Final = "127.0.0.1"
_PLAN: Final = "upload"
_INFER_REPLY: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(_OUTPUTS),
    _OUTPUTS,
)


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Time of a request on the device in addition to kernels, coding and link.

    Attributes:
        fixed_s: time for each request of a session, over TLS, after a pause.
        byte_s: processor time for each byte of the body.
        local_s: time that a session adds to each local run of the whole model.
    """

    fixed_s: Annotated[float, Range(0, 3600)] = 0.0
    byte_s: Annotated[float, Range(0, 1)] = 0.0
    local_s: Annotated[float, Range(0, 3600)] = 0.0

    def seconds(self, body_bytes: float) -> float:
        return self.fixed_s + self.byte_s * body_bytes


def measure_request(pause_s: float, seconds: float, gate: SpeedGate, share: float = 1.0) -> RequestCost:
    """Measure the time of a request to a local server that computes nothing.

    The request goes through a `RemoteSession` over TLS. During the pauses, other programs may use the caches
    and the processor may sleep, as between the requests of an application.

    Args:
        pause_s: pause before each request, and before its reply.
        seconds: time limit of the requests that count. All requests together take at most three times as
            long. The measurement ends earlier once the times are known within 1 % or 20 µs.
        gate: decides which requests count.
        share: share of a processor that this process receives.

    Raises:
        TransportError: this machine cannot connect to itself.
    """
    until_s = time.monotonic() + MOST_WAITING * seconds
    fixed_s: list[float] = []
    spent_s: list[float] = []
    local_s: list[float] = []
    usual_s, draws = 0.0, random.Random(0)  # noqa: S311  # of moments
    with tempfile.TemporaryDirectory(prefix="edgekit-request-") as folder:
        certificate = _write_certificate(Path(folder))
        with _Responder(certificate, pause_s) as responder, _Asker(responder, certificate) as asker:
            for _ in range(_WARM_UP_REQUESTS):
                asker.ask(_LEAST_BYTES)
                asker.run_locally()
            while len(fixed_s) < _LEAST_REQUESTS or (
                usual_s < seconds
                and time.monotonic() < until_s
                and not (is_precise(fixed_s, _WITHIN_S) and is_precise(local_s, _WITHIN_S))
            ):
                began_s = time.monotonic()
                time.sleep(pause_s)
                begin_anywhere(draws, share)
                duration = asker.ask(_LEAST_BYTES)
                time.sleep(pause_s)
                took_s = asker.run_locally() / share
                if not gate.check() and time.monotonic() < until_s:
                    continue
                fixed_s.append(duration.elapsed_s - duration.responder_s / share)
                local_s.append(took_s)
                usual_s += time.monotonic() - began_s
                if len(spent_s) < _LARGE_REQUESTS:
                    spent_s.append((asker.ask(_LARGE_BYTES).cpu_s - duration.cpu_s) / share)
    byte_s = statistics.median(spent_s) / (_LARGE_BYTES - _LEAST_BYTES)
    return RequestCost(max(average_middle(fixed_s), 0.0), max(byte_s, 0.0), average_middle(local_s))


def average_middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half of the values, which is as robust as a median."""
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def is_precise(values: Sequence[float], within: float = 0.0) -> bool:
    """Return whether the standard error of `average_middle(values)` is small.

    The limit is 1 % of the median or `within`, whichever is larger. `within` has the unit of `values`. Fewer
    than 20 values are never precise. The standard error is computed from the distance of the quartiles, as
    for a normal distribution.
    """
    if len(values) < _LEAST_PRECISE:
        return False
    lower, middle, upper = statistics.quantiles(values, n=4)
    return 1.09 / 1.35 * (upper - lower) <= max(_PRECISION * middle, within) * math.sqrt(len(values))


def _write_certificate(folder: Path) -> Path:
    """Write a key and its certificate for loopback to one file, and return its path."""
    now = datetime.datetime.now(datetime.timezone.utc)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "edgekit responder")])
    parts = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.IPv4Address(_LOOPBACK))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = folder / "responder.pem"
    path.write_bytes(secret + parts.public_bytes(Encoding.PEM))
    return path


@dataclass(frozen=True, slots=True)
class _AskTimes:
    """Times of a request.

    Attributes:
        elapsed_s: time until its reply, without the pause before that.
        cpu_s: processor time without the responder's.
        responder_s: processor time of the responder.
    """

    elapsed_s: float
    cpu_s: float
    responder_s: float


class _Asker:
    """A session of an application that sends all of its inputs to the responder."""

    def __init__(self, responder: "_Responder", certificate: Path) -> None:
        self._responder = responder
        plan = OffloadPlan(_PLAN, PlanCosts(0.0, is_measured=True), tail=NO_MODEL)
        server = f"https://{_LOOPBACK}:{responder.port}"
        options = OffloadOptions(
            server,
            ca_file=str(certificate),
            timeout_s=_REQUEST_LIMIT_S,
            probe_bytes_per_hour=0,  # the responder takes one connection
            plan=_PLAN,
        )
        self._session = RemoteSession(_make_package(), CutTable((plan,)), options, None, None)
        self._session.wait_for_probe(_REQUEST_LIMIT_S)
        package, local = _make_package(), OffloadPlan(LOCAL, PlanCosts(0.0, is_measured=True))
        nobody = OffloadOptions(f"https://{_LOOPBACK}:{_UNUSED_PORT}", plan=LOCAL)
        self._local = RemoteSession(package, CutTable((local,)), nobody, _NoModel(package.manifest), None)

    def __enter__(self) -> "_Asker":
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()
        self._local.close()

    def run_locally(self) -> float:
        """Return the processor time of a run that computes nothing."""
        inputs = {"x": np.zeros(_LEAST_BYTES, np.uint8)}
        began_s = time.thread_time()
        self._local.run(inputs)
        return time.thread_time() - began_s

    def ask(self, size_bytes: int) -> _AskTimes:
        inputs = {"x": np.zeros(size_bytes, np.uint8)}
        responder_s, cpu_s, began_s = self._responder.cpu_s, time.process_time(), time.monotonic()
        try:
            self._session.run(inputs)
        except EdgekitError as cause:
            raise TransportError(f"this machine cannot ask itself: {cause}") from cause
        elapsed_s = time.monotonic() - began_s - self._responder.paused_s
        responder_s = self._responder.cpu_s - responder_s
        return _AskTimes(elapsed_s, time.process_time() - cpu_s - responder_s, responder_s)


class _NoModel:
    def __init__(self, manifest: Manifest) -> None:
        self.inputs, self.outputs = manifest.inputs, manifest.outputs

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for spec in self.inputs:
            spec.check(inputs[spec.name])
        return {spec.name: np.zeros(1, np.float32) for spec in self.outputs}

    def close(self) -> None:
        pass


def _make_package() -> OpenedPackage:
    """Return a package in memory of a model with one input of any size and the responder's output."""
    contents = {"golden/x": bytes(1), "golden/y": bytes(4), "model": b""}
    offsets = dict(zip(contents, (0, 1, 5), strict=True))
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in contents.items()}
    manifest = Manifest(
        name="request",
        version="1",
        target="any",
        inputs=(TensorSpec("x", "uint8", ("bytes",)),),
        outputs=(TensorSpec("y", "float32", (1,)),),
        artifacts=tuple(
            Artifact(path, len(data), digests[path], "model" if path == "model" else "golden")
            for path, data in contents.items()
        ),
        backend=BackendChoice("offload", "model"),
        golden=Golden(
            (GoldenInput("x", "uint8", (1,), "golden/x"),),
            (GoldenOutput(name="y", dtype="float32", shape=(1,), path="golden/y", atol=0.0, rtol=0.0),),
        ),
    )
    members = {path: Member(path, 0, offsets[path], len(data), 0) for path, data in contents.items()}
    view = memoryview(b"".join(contents.values()))
    return OpenedPackage(Path("request"), manifest, "", file=PackageFile(view, view), members=members)


class _Responder:
    """A thread that takes requests on loopback over TLS, and answers each the same after a pause.

    Attributes:
        cpu_s: its processor time until the last reply.
        paused_s: length of the last pause.
    """

    def __init__(self, certificate: Path, pause_s: float) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._listener = socket.create_server((_LOOPBACK, 0))
        self._pause_s = pause_s
        self.port: int = self._listener.getsockname()[1]
        self.cpu_s = self.paused_s = 0.0
        self._thread = threading.Thread(target=self._serve, name="edgekit-responder", daemon=True)

    def __enter__(self) -> "_Responder":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join(_REQUEST_LIMIT_S)

    def _serve(self) -> None:
        memory = memoryview(bytearray(_READ_BYTES))
        with contextlib.suppress(OSError):
            plain, _ = self._listener.accept()
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._context.wrap_socket(plain, server_side=True) as connection:
                while count := connection.recv_into(memory):
                    head, _, body = bytes(memory[:count]).partition(b"\r\n\r\n")
                    missing = int(head.rpartition(b"Content-Length: ")[2] or 0) - len(body)
                    while missing > 0:
                        missing -= connection.recv_into(memory)
                    began_s = time.monotonic()
                    time.sleep(self._pause_s)
                    self.paused_s = time.monotonic() - began_s
                    self.cpu_s = time.thread_time()
                    connection.sendall(_INFER_REPLY)
