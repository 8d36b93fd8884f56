"""Ten thousand clients that say nothing, and one that asks."""

import contextlib
import resource
import socket
import time
from pathlib import Path

from tests.service.serve_parts import Served, served
from tests.service.service_parts import Replies, X, Y, infer_bytes
from tests.waiting import bounded

WANTED = 10_000
MAX_PER_CONNECTION_BYTES = 8_000
FEW_DESCRIPTORS = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120));"
    " from edgekit_runtime.cli import main; sys.exit(main(sys.argv[1:]))"
)


def resident_bytes(process: int) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_idle_connections_cost_little_and_hold_nobody_up(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(WANTED, hard - 200)
    if count < WANTED:
        print(f"only {count} connections: the limit of descriptors is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with served(folder, is_copy=False) as service, contextlib.ExitStack() as stack:
            path = str(service.socket_path)

            def connect() -> socket.socket:
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.connect(path)  # blocking, since others stand in the queue
                client.settimeout(20)
                return client

            asking = connect()
            asking.sendall(infer_bytes(X))
            assert Replies(asking).next().status == 200
            before = resident_bytes(service.process.pid)
            for _ in range(count):
                connect()
            asking.sendall(infer_bytes(X))
            assert Replies(asking).next().binary == Y
            grown = resident_bytes(service.process.pid) - before
            assert grown / count < MAX_PER_CONNECTION_BYTES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_service_without_free_descriptors_turns_clients_away_and_recovers(folder: Path) -> None:
    """The limit of descriptors is met before that of connections: no busy loop, no hang."""
    config = folder / "c.toml"
    config.write_text("[http]\nidle_timeout_s = 600\n")
    service = Served(folder, "--config", str(config), command=("-c", FEW_DESCRIPTORS))
    with bounded(service.process):
        assert "ready at" in service.wait_ready()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(150)]
            for client in clients:
                client.connect(str(service.socket_path))
                client.settimeout(20)
            assert Replies(clients[-1]).next().status == 503
            clients[0].sendall(infer_bytes(X))
            assert Replies(clients[0]).next().status == 200
        time.sleep(0.2)
        with service.connect() as client:
            client.sendall(infer_bytes(X))
            assert Replies(client).next().status == 200
        assert service.end()[0] == 0
