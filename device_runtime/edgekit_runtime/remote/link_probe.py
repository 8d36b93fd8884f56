"""Measures the link to a server of the Open Inference Protocol: round trip, and bandwidth both ways.

Nothing but ordinary requests over one connection, so any such server will do:

- Round trip: the least that TCP saw, which is of the network alone; what both machines do for a request is in
  the costs of a plan. Where the system does not say, the median of `GET /v2/health/live`.
- Upload: inference requests with a large body for a model that no server has. The server must read the body
  before it answers 404. Two sizes take turns; bandwidth is the difference of their bytes by the difference of
  their times until the reply, so that round trip and work of the server drop out. When a call to send
  returns says nothing: it only filled the buffers of this machine.
- Download: the protocol has no large reply that needs no model. So many requests for the longest page that
  the server has are sent at once, and two numbers of them are compared in the same way. The server's work for
  them is in it, so this is a lower bound.

It does not estimate from the traffic of an application (`link_estimate`).

`measure_request` measures what a request takes beside the link and the models: a session's choice and checks,
encoding, threads, HTTP, and what the session learns from the reply.
"""

import contextlib
import datetime
import fcntl
import hashlib
import ipaddress
import random
import socket
import ssl
import statistics
import struct
import tempfile
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Final

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from edgekit_runtime.client.link import Address, open_connection
from edgekit_runtime.client.requests import make_request_head, token_line
from edgekit_runtime.client.responses import ResponseHead, parse_head
from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import EdgekitError, TransportError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.canonical_zip import Member
from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.package.manifest_entries import Artifact, BackendChoice
from edgekit_runtime.protocol.rest import model_path
from edgekit_runtime.remote.cut_table import LOCAL, CutTable, OffloadPlan, PlanCosts
from edgekit_runtime.remote.latency_model import LinkState
from edgekit_runtime.remote.offload_options import OffloadOptions
from edgekit_runtime.remote.offload_server import NO_MODEL
from edgekit_runtime.remote.session.remote_session import RemoteSession
from edgekit_runtime.system.processor_speed import MOST_WAITING, SpeedGate, begin_anywhere
from edgekit_runtime.tensors import Array, TensorSpec

_BITS: Final = 8
_LIVE: Final = "/v2/health/live"
_PAGES: Final = ("/metrics", "/v2")
_PINGS: Final = 20
_LEAST_BYTES: Final = 4 << 10
_MOST_BYTES: Final = 8 << 20
_MOST_PAGES: Final = 1024
_GROWTH: Final = 4  # between two sizes
_ENOUGH_S: Final = 0.25  # a transfer of this length is long against the jitter of a round trip
_ROUNDS: Final = 3
_MAX_REPLY_BYTES: Final = 1 << 20
_MAX_LINE_BYTES: Final = 16 << 10
_MAX_LINES: Final = 100
_REFUSED: Final = (401, 403)
_TOO_LARGE: Final = 413

_WARM_UP_REQUESTS: Final = 3
_LEAST_REQUESTS: Final = 5
_LARGE_REQUESTS: Final = 3  # their processor time varies little
_LARGE_BYTES: Final = 1 << 20
_TCP_INFO_BYTES: Final = 192
_MIN_RTT_AT: Final = 148  # of struct tcp_info in linux/tcp.h, in microseconds
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

_Rate = Annotated[float, Range(0, 1e12)]


@dataclass(frozen=True, slots=True)
class RequestCost:
    """What a request takes on the device beside kernels, coding and link.

    Attributes:
        fixed_s: of every request of a session, over TLS, after a pause.
        byte_s: of every byte of the body: processor time.
        local_s: of every run of the whole model here: what the session does beside it.
    """

    fixed_s: Annotated[float, Range(0, 3600)] = 0.0
    byte_s: Annotated[float, Range(0, 1)] = 0.0
    local_s: Annotated[float, Range(0, 3600)] = 0.0

    def seconds(self, body_bytes: float) -> float:
        """Return the time of a request with a body of so many bytes."""
        return self.fixed_s + self.byte_s * body_bytes


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """What a link gave.

    Attributes:
        server: address of the server.
        rtt_s: round trip of the network.
        rtt_spread: of small requests, the distance of the quartiles as a share of the median.
        up_bits_per_s: bandwidth to the server.
        down_bits_per_s: bandwidth from the server, a lower bound; None where the server does not take
            requests in a row.
        sent_bytes: size of the larger of the two uploads that were compared.
    """

    server: str
    rtt_s: Annotated[float, Range(0, 3600)]
    rtt_spread: Annotated[float, Range(0, 1e9)]
    up_bits_per_s: _Rate
    down_bits_per_s: _Rate | None
    sent_bytes: int

    @property
    def state(self) -> LinkState:
        """The link for a prediction; a download that was not measured is as fast as the upload."""
        down_bits_per_s = self.up_bits_per_s if self.down_bits_per_s is None else self.down_bits_per_s
        return LinkState(self.up_bits_per_s, down_bits_per_s, self.rtt_s)


def probe_link(
    server: str,
    *,
    token: str | None = None,
    ca_file: str | None = None,
    insecure: bool = False,
    seconds: float = 5.0,
) -> LinkProbe:
    """Return what the link to a server gives now.

    It sends at most 100 MB, on slow links far less.

    Args:
        server: `host:port`, `http://host:port` or `https://host:port`.
        token: for servers that want one.
        ca_file: PEM file of the authority that signed the server's certificate.
        insecure: whether it may be another machine over plain HTTP; with a token it may not.
        seconds: time limit, kept to within one transfer; no reply may take longer either.

    Raises:
        TransportError: the server cannot be reached, does not answer in time, refuses the token, or answers
            before it has read a request.
        DataError: the token cannot stand in a header.
        ConfigError: it is plain HTTP to another machine, which is not allowed.
    """
    address = Address.parse(server, ca_file, has_token=bool(token), insecure=insecure)
    begin_s = time.monotonic()
    try:
        with _Exchange(address, token, seconds) as exchange:
            pings = [exchange.time_pages(_LIVE, 1) for _ in range(_PINGS)]
            lower, ping_s, upper = statistics.quantiles(pings, n=4)
            rtt_s = exchange.read_round_trip() or ping_s
            sent_bytes, up_bits_per_s = _probe_upload(exchange, begin_s + seconds / 2)
            down_bits_per_s = None
            with contextlib.suppress(OSError, ValueError):  # no requests in a row, or no length of its pages
                down_bits_per_s = _probe_download(exchange, begin_s + seconds)
    except (OSError, ValueError) as cause:
        raise TransportError(f"{address}: {cause}; is this an inference server?") from cause
    return LinkProbe(
        str(address), rtt_s, (upper - lower) / ping_s, up_bits_per_s, down_bits_per_s, sent_bytes
    )


class _Exchange:
    """A connection that times requests from their first byte to the last byte of their replies."""

    def __init__(self, address: Address, token: str | None, timeout_s: float) -> None:
        self._fields = f"Host: {address.host}\r\n{token_line(token)}"
        self._address = address
        self._socket = open_connection(address, timeout_s)
        self._socket.settimeout(timeout_s)
        self._file: IO[bytes] = self._socket.makefile("rb")

    def __enter__(self) -> "_Exchange":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def time_pages(self, path: str, count: int) -> float:
        """Return how long `count` requests for a page take that are sent at once, in seconds."""
        request = make_request_head("GET", path, self._fields) * count
        begin = time.perf_counter()
        self._socket.sendall(request)
        for _ in range(count):
            self._read_reply()
        return time.perf_counter() - begin

    def read_round_trip(self) -> float | None:
        """Return the least round trip that TCP saw on this connection; None where the system does not say."""
        try:
            data = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except (OSError, AttributeError):
            return None
        if len(data) < _MIN_RTT_AT + 4:
            return None
        return float(struct.unpack_from("=I", data, _MIN_RTT_AT)[0] * 1e-6)

    def count_page(self, path: str) -> int:
        """Return the size of a page with its head in bytes."""
        self._socket.sendall(make_request_head("GET", path, self._fields))
        head = self._read_reply()
        return len(head.data) + head.body_bytes

    def time_upload(self, size_bytes: int) -> float | None:
        """Return how long a body takes to be answered, in seconds; None if the server takes none so large.

        Raises:
            TransportError: it answers before it has read the body.
        """
        path = f"{model_path(NO_MODEL)}/infer"
        fields = f"{self._fields}Content-Type: application/octet-stream\r\n"
        request = make_request_head("POST", path, fields, size_bytes) + bytes(size_bytes)
        begin = time.perf_counter()
        try:
            self._socket.sendall(request)
        except (BrokenPipeError, ConnectionResetError):
            is_cut = True  # it refused and closed: its reply says why
        else:
            is_cut = False
        head = self._read_reply()
        elapsed_s = time.perf_counter() - begin
        if head.status == _TOO_LARGE:
            return None
        if is_cut or head.closes or _count_unacknowledged(self._socket):
            raise TransportError(
                f"{self._address}: answered {head.status} before it had read the request, so the upload"
                " cannot be measured; state --bandwidth instead"
            )
        return elapsed_s

    def reconnect(self) -> None:
        """Begin again on a new connection, after a reply that ended the old one."""
        timeout_s = self._socket.gettimeout() or 1.0
        self.__exit__()
        self._socket = open_connection(self._address, timeout_s)
        self._socket.settimeout(timeout_s)
        self._file = self._socket.makefile("rb")

    def _read_reply(self) -> ResponseHead:
        """Return the head of the next reply, and drop its body.

        Raises:
            TransportError: the server refuses the token.
            OSError: the connection ended, or nothing came in time.
            ValueError: it is no HTTP.
        """
        lines = [self._file.readline(_MAX_LINE_BYTES)]
        while lines[-1] not in (b"\r\n", b"") and len(lines) < _MAX_LINES:
            lines.append(self._file.readline(_MAX_LINE_BYTES))
        if lines[-1] != b"\r\n":
            raise ConnectionResetError("the connection ended before a reply")
        head = parse_head(b"".join(lines), _MAX_REPLY_BYTES)
        if head.status in _REFUSED:
            raise TransportError(f"{self._address}: answered {head.status}; give the server's token")
        if len(self._file.read(head.body_bytes)) < head.body_bytes:
            raise ConnectionResetError("the connection ended within a reply")
        return head


def _probe_upload(exchange: _Exchange, until_s: float) -> tuple[int, float]:
    """Return the larger of the sizes that were compared, and bits per second."""
    size_bytes = _LEAST_BYTES
    while size_bytes < _MOST_BYTES and time.monotonic() < until_s:
        # Each one also widens TCP's window, so that the last ones are limited by the link alone.
        elapsed_s = exchange.time_upload(size_bytes * _GROWTH)
        if elapsed_s is None:
            exchange.reconnect()
            break
        size_bytes *= _GROWTH
        if elapsed_s > _ENOUGH_S:
            break
    times: dict[int, list[float]] = {size_bytes // _GROWTH: [], size_bytes: []}
    for number in range(_ROUNDS):
        if number and time.monotonic() > until_s:
            break
        for each, found in times.items():
            found.append(exchange.time_upload(each) or 0.0)
    small_s, large_s = (statistics.median(found) for found in times.values())
    if large_s <= small_s:
        raise TransportError("a larger request took no longer than a small one; state --bandwidth instead")
    return size_bytes, (size_bytes - size_bytes // _GROWTH) * _BITS / (large_s - small_s)


def _probe_download(exchange: _Exchange, until_s: float) -> float | None:
    """Return bits per second, or None if more pages took no longer."""
    sizes = {exchange.count_page(path): path for path in _PAGES}
    page_bytes = max(sizes)
    path, count = sizes[page_bytes], 1
    while count < _MOST_PAGES and time.monotonic() < until_s:
        count *= _GROWTH
        if exchange.time_pages(path, count) > _ENOUGH_S:
            break
    times: dict[int, list[float]] = {max(1, count // _GROWTH): [], count: []}
    for number in range(_ROUNDS):
        if number and time.monotonic() > until_s:
            break
        for each, found in times.items():
            found.append(exchange.time_pages(path, each))
    small_s, large_s = (statistics.median(found) for found in times.values())
    if len(times) < len({1, count}) or large_s <= small_s:
        return None
    return (count - count // _GROWTH) * page_bytes * _BITS / (large_s - small_s)


def _count_unacknowledged(connected: Any) -> int:
    """Return how many sent bytes the other side has not received, 0 where the system does not say.

    A reply acknowledges all that was received before it.
    """
    with contextlib.suppress(OSError):
        found = fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
        return int(struct.unpack("i", found)[0])
    return 0


def measure_request(pause_s: float, seconds: float, gate: SpeedGate, share: float = 1.0) -> RequestCost:
    """Return what a request takes on this machine, asked of a responder of its own that computes nothing.

    It goes through a `RemoteSession` over TLS, and the reply comes `pause_s` later: while a device waits for
    a server, others use its caches, and its processor may sleep.

    Args:
        pause_s: before each request, and before its reply.
        seconds: of requests that count; at most three times as long in all, after the least number.
        gate: tells which requests count.
        share: of a processor that this process gets.

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
            while len(fixed_s) < _LEAST_REQUESTS or (usual_s < seconds and time.monotonic() < until_s):
                began_s = time.monotonic()
                time.sleep(pause_s)
                begin_anywhere(draws, share)
                took = asker.ask(_LEAST_BYTES)
                time.sleep(pause_s)
                took_s = asker.run_locally() / share
                if not gate.check() and time.monotonic() < until_s:
                    continue
                fixed_s.append(took.elapsed_s - took.responder_s / share)
                local_s.append(took_s)
                usual_s += time.monotonic() - began_s
                if len(spent_s) < _LARGE_REQUESTS:
                    spent_s.append((asker.ask(_LARGE_BYTES).cpu_s - took.cpu_s) / share)
    byte_s = statistics.median(spent_s) / (_LARGE_BYTES - _LEAST_BYTES)
    return RequestCost(max(average_middle(fixed_s), 0.0), max(byte_s, 0.0), average_middle(local_s))


def average_middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half: as robust as a median, and finer where values are rounded."""
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _write_certificate(folder: Path) -> Path:
    """Write a key and a certificate of it for loopback, and return the path of the one file."""
    now = datetime.datetime.now(datetime.timezone.utc)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "edgekit responder")])
    made = (
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
    path.write_bytes(secret + made.public_bytes(Encoding.PEM))
    return path


@dataclass(frozen=True, slots=True)
class _Took:
    """What a request took.

    Attributes:
        elapsed_s: until its reply, without the pause before that.
        cpu_s: of the processor, without the responder.
        responder_s: of the processor, the responder.
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

    def ask(self, size_bytes: int) -> _Took:
        inputs = {"x": np.zeros(size_bytes, np.uint8)}
        responder_s, cpu_s, began_s = self._responder.cpu_s, time.process_time(), time.monotonic()
        try:
            self._session.run(inputs)
        except EdgekitError as cause:
            raise TransportError(f"this machine cannot ask itself: {cause}") from cause
        elapsed_s = time.monotonic() - began_s - self._responder.paused_s
        responder_s = self._responder.cpu_s - responder_s
        return _Took(elapsed_s, time.process_time() - cpu_s - responder_s, responder_s)


class _NoModel:
    """A session that checks its inputs and computes nothing."""

    def __init__(self, manifest: Manifest) -> None:
        self.inputs, self.outputs = manifest.inputs, manifest.outputs

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for spec in self.inputs:
            spec.check(inputs[spec.name])
        return {spec.name: np.zeros(1, np.float32) for spec in self.outputs}

    def close(self) -> None:
        pass


def _make_package() -> OpenedPackage:
    """Return a package, in memory alone, of a model with one input of any size and the responder's output."""
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
            (GoldenOutput("y", "float32", (1,), "golden/y", 0.0, 0.0),),
        ),
    )
    members = {path: Member(path, 0, offsets[path], len(data), 0) for path, data in contents.items()}
    view = memoryview(b"".join(contents.values()))
    return OpenedPackage(Path("request"), manifest, "", view=view, members=members)


class _Responder:
    """A thread that takes requests on loopback over TLS, and answers each the same after a pause.

    Attributes:
        port: where it listens.
        cpu_s: processor time that it took until the last reply.
        paused_s: how long the last pause was.
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
                    head, _, rest = bytes(memory[:count]).partition(b"\r\n\r\n")
                    missing = int(head.rpartition(b"Content-Length: ")[2] or 0) - len(rest)
                    while missing > 0:
                        missing -= connection.recv_into(memory)
                    began_s = time.monotonic()
                    time.sleep(self._pause_s)
                    self.paused_s = time.monotonic() - began_s
                    self.cpu_s = time.thread_time()
                    connection.sendall(_INFER_REPLY)
