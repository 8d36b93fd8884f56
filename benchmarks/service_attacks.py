"""What clients feel while another client misbehaves: their p99 before and during each attack.

    scripts/python benchmarks/service_attacks.py
        [--rounds 5] [--seconds 3]

One service process on loopback and a Unix socket, with TLS and a token, serves models/tiny/digits_cnn.onnx to
one client that asks without a pause. The attacks, each in turn with as many seconds of quiet:

- resets: 40 TLS connections, one after the other again and again, reset right after their handshake.
- silent: 256 finished TLS handshakes that send nothing, opened again when the service ends them.
- answer: JSON answers of 84 x 8400 values, which are within the limit, one after the other.
- huge answer: requests whose JSON answers would hold 60 MiB of values, and are refused.
- long request: JSON requests of 2 MiB, the limit.

After resets and silent, 40 clients ask over TLS and the Unix socket in turn; each must get an answer. The
goal: p99 at most twice that of before (median of the rounds), no failed request, 40 of 40 answered. An
attacker takes time of the cores himself; `connects`, which is no attack, shows how much: 40 clients with the
token, each with a handshake and a request. Figures are of this machine and this run: compare ratios. It ends
with exit code 1 where the goal is missed.
"""

import contextlib
import json
import re
import socket
import ssl
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from tests.service.serve_parts import TOKEN, write_certificate

from graphs import GraphBuilder
from results import make_parser, print_head
from service_soak import Versions
from serving import Service, serving
from soak_clients import asking

CLIENTS: Final = 40
SILENT: Final = 256
WIDTH: Final = 8400
ANSWER_ROWS, HUGE_ROWS = 84, 60 * 2**20 // (4 * WIDTH)
Attack = Callable[["Target", threading.Event], None]


class Target:
    def __init__(self, folder: Path, service: Service) -> None:
        self.port, self.path = service.port, service.path
        self._context = ssl.create_default_context(cafile=str(folder / "cert.pem"))

    def connect(self) -> ssl.SSLSocket:
        raw = socket.create_connection(("127.0.0.1", self.port), 10)
        return self._context.wrap_socket(raw, server_hostname="127.0.0.1")

    def connect_unix(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(30)
        client.connect(self.path)
        return client

    def count_answered(self) -> int:
        """Return how many of 40 clients, over TLS and the Unix socket in turn, get an answer in 5 s."""
        head = f"GET /v2 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        answered = 0
        with contextlib.ExitStack() as stack:
            for number in range(CLIENTS):
                with contextlib.suppress(OSError):
                    client = stack.enter_context(self.connect() if number % 2 else self.connect_unix())
                    client.settimeout(5)
                    client.sendall(head)
                    answered += client.recv(65536).startswith(b"HTTP/1.1 200")
        return answered


def reset(target: Target, over: threading.Event) -> None:
    while not over.is_set():
        for _ in range(CLIENTS):
            client = target.connect()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        over.wait(0.5)


def be_silent(target: Target, over: threading.Event) -> None:
    with contextlib.ExitStack() as stack:
        while not over.is_set():
            for _ in range(SILENT):
                stack.enter_context(target.connect())
            over.wait(8.0)
            stack.close()


def connect_well(target: Target, over: threading.Event) -> None:
    """Connect as those attackers do, with the token and a request on each."""
    while not over.is_set():
        target.count_answered()
        over.wait(0.5)


def ask_rows(rows: int) -> Attack:
    """Ask for `rows` x 8400 values as JSON, again and again."""
    x = np.random.default_rng(0).random((rows, 1), np.float32)
    entry = {"name": "x", "datatype": "FP32", "shape": [rows, 1], "data": x.reshape(-1).tolist()}
    return ask_repeatedly({"inputs": [entry]})


def ask_long() -> Attack:
    """Send requests of just under 2 MiB of JSON."""
    x = np.random.default_rng(0).random((95_000, 1), np.float32)
    entry = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.tolist()}
    return ask_repeatedly({"inputs": [entry], "outputs": [{"name": "first"}]}, "first")


def ask_repeatedly(request: dict[str, Any], model: str = "wide") -> Attack:
    """Return what sends the request, and takes its answer, until it is over."""
    body = json.dumps(request, separators=(",", ":")).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: l\r\nContent-Length: {len(body)}\r\n\r\n"

    def attack(target: Target, over: threading.Event) -> None:
        with target.connect_unix() as client:
            while not over.is_set():
                client.sendall(head.encode() + body)
                read_answer(client)

    return attack


def read_answer(client: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(1 << 20)
    head, _, begun = data.partition(b"\r\n\r\n")
    found = re.search(rb"Content-Length: (\d+)", head)
    left = int(found[1]) - len(begun) if found else 0
    while left > 0:
        left -= len(client.recv(1 << 20))


ATTACKS: Final[dict[str, Attack]] = {
    "connects": connect_well,
    "resets": reset,
    "silent": be_silent,
    "answer": ask_rows(ANSWER_ROWS),
    "huge_answer": ask_rows(HUGE_ROWS),
    "long_request": ask_long(),
}
LOCK_OUTS: Final = ("resets", "silent")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), arguments.rounds, arguments.seconds)
    return report(found, arguments.rounds)


def write_models(versions: Versions) -> None:
    """Write `wide`, y[N, 8400] = x[N, 1] * row, and `first`, the first row of x."""
    wide, first = GraphBuilder(), GraphBuilder()
    row = np.random.default_rng(1).random((1, WIDTH), np.float32)
    wide.add("Mul", ["x", wide.weight(row)], "wide")
    first.add("Gather", ["x", first.weight(np.array([0]))], "first", axis=0)
    for name, build, shape in (("wide", wide, ("N", WIDTH)), ("first", first, (1, 1))):
        model = build.model({"x": ("N", 1)}, {name: shape}).SerializeToString()
        versions.write(name, model, {"x": np.ones((2, 1), np.float32)})


def measure(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    versions = Versions(folder)
    versions.make(1)
    versions.publish()
    write_models(versions)
    certificate, key = write_certificate(folder)
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    config = (
        f"[listen]\ntls_certificate = '{certificate}'\ntls_key = '{key}'\n"
        f"token_file = '{folder / 'token'}'\n[http]\nmax_tls_connections = {SILENT}\n"
    )
    phases = [
        f"{attack}_{what} {number}"
        for attack in ATTACKS
        for number in range(rounds)
        for what in ("before", "during")
    ]
    names = ("start", *phases)
    answered: dict[str, list[int]] = {attack: [] for attack in LOCK_OUTS}
    with (
        serving(folder, versions.folder, config=config) as service,
        asking(service.path, 1, versions.question, names) as load,
    ):
        target = Target(folder, service)
        load.begin("start", 1.0)
        for name, attack in ATTACKS.items():
            for number in range(rounds):
                load.begin(f"{name}_before {number}", seconds)
                with attacking(attack, target):
                    load.begin("start", 0.3)
                    load.begin(f"{name}_during {number}", seconds)
                    load.begin("start")
                    if name in LOCK_OUTS:
                        answered[name].append(target.count_answered())
    return {
        "phases": {name: load.describe(name) for name in phases},
        "totals": {
            what: load.describe(what)
            for attack in ATTACKS
            for what in (f"{attack}_before", f"{attack}_during")
        },
        "answered": answered,
        "errors": load.errors,
    }


@contextlib.contextmanager
def attacking(attack: Attack, target: Target) -> Iterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=attack, args=(target, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


def report(found: dict[str, Any], rounds: int) -> int:
    misses = len(found["errors"])
    print_head(
        "attack | p99 before, us | during | during / before, median (all) | failed | 40 clients answered"
    )
    for attack in ATTACKS:
        before, during = (found["totals"][f"{attack}_{what}"] for what in ("before", "during"))
        ratios = [
            found["phases"][f"{attack}_during {number}"]["p99_us"]
            / found["phases"][f"{attack}_before {number}"]["p99_us"]
            for number in range(rounds)
        ]
        ratio, failed = float(np.median(ratios)), before["failed"] + during["failed"]
        answered = found["answered"].get(attack)
        misses += failed + (ratio > 2 and attack != "connects") + (min(answered or [CLIENTS]) < CLIENTS)
        print(
            f"| {attack} | {before['p99_us']:.0f} | {during['p99_us']:.0f} | {ratio:.2f}"
            f" ({', '.join(f'{each:.2f}' for each in ratios)}) | {failed} | {answered or '-'} |"
        )
    for error in found["errors"]:
        print(error)
    return int(misses > 0)


if __name__ == "__main__":
    sys.exit(main())
