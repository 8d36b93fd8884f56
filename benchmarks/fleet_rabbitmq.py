"""A fleet on two nodes of RabbitMQ 4: what `doctor` finds, and what happens when a node dies.

    scripts/python -m benchmarks.fleet_rabbitmq [--devices 100]
        [--managers 1]

About 60 s, and as long again at the first call; needs root and Debian's apt. Debian 13's rabbitmq-server is
unpacked into the folder for temporary files, nothing is installed. Both nodes listen on loopback with the
fleet's certificates. The manager connects to the first node, simulated devices to the second; then the second
node is killed during one release and the first during another. Two managers share a PostgreSQL; one of them
connects to the second node first.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.fleet_parts import MODEL, limit_time, roll_out, wait_for_end
from benchmarks.results import make_parser, write_json
from tests.fleet.postgresql_server import PostgresqlServer
from tests.free_port import free_port

from edgekit_fleet.identity.authority import Authority, open_authority
from edgekit_fleet.manager.control_loop import ControlLoop, ManagerParts
from edgekit_fleet.operations.doctor import probe_broker
from edgekit_fleet.releases.manager_key import ManagerKey
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.rollouts.runner import RolloutRunner
from edgekit_fleet.simulation.behaviour import DeviceBehaviour
from edgekit_fleet.simulation.enrolment import enrol_simulated, read_access
from edgekit_fleet.simulation.simulated_fleet import SimulatedFleet
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.shards import MOST_MANAGERS, Shards

LIMIT_S = 280
SUITE = "trixie"
MANAGERS = tuple(Authority.name_manager(number) for number in range(MOST_MANAGERS))
DOCTOR = ("edgekit-doctor-1", "edgekit-doctor-2")
FAST = DeviceBehaviour(install_s=0.1, confirm_s=0.2, figures_s=60.0)
CONFIGURATION = """\
listeners.tcp = none
mqtt.listeners.tcp = none
mqtt.listeners.ssl.default = 127.0.0.1:{port}
ssl_options.cacertfile = /fleet/authority.crt
ssl_options.certfile = /fleet/server.crt
ssl_options.keyfile = /fleet/server.pem
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = true
ssl_cert_login_from = common_name
mqtt.ssl_cert_login = true
mqtt.allow_anonymous = false
load_definitions = /fleet/definitions.json
log.console.level = error
cluster_formation.peer_discovery_backend = classic_config
cluster_formation.classic_config.nodes.1 = ek1@localhost
cluster_formation.classic_config.nodes.2 = ek2@localhost
disk_free_limit.absolute = 100MB
"""


def unpack_rabbitmq() -> Path:
    """Return the root of a Debian 13 with rabbitmq-server, unpacked only; it is made once."""
    place = Path(tempfile.gettempdir()) / "edgekit-rabbitmq"
    root = place / "root"
    if (place / "done").exists():
        return root
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    subprocess.run(["apt-get", "download", "-q", "debootstrap"], cwd=place, check=True, capture_output=True)
    subprocess.run(["dpkg-deb", "-x", *place.glob("*.deb"), place / "tool"], check=True)
    tool = place / "tool/usr/sbin/debootstrap"
    options = ["--foreign", "--variant=minbase", "--include=rabbitmq-server", SUITE, str(root)]
    variables = {**os.environ, "DEBOOTSTRAP_DIR": str(place / "tool/usr/share/debootstrap")}
    subprocess.run([tool, *options], env=variables, check=True, capture_output=True)
    for package in (root / "var/cache/apt/archives").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (place / "done").touch()
    return root


def permit(names: list[str]) -> dict[str, object]:
    """Return users and permissions: the name in the certificate may write and read its own topics."""
    users, permissions, topics = [], [], []
    for name in names:
        own = r"ek\.v1\..*" if name in MANAGERS else r"ek\.v1\.d\.{username}\.(%s)"
        write, read = ("hello|reported|event|online", "desired|command")
        users.append({"name": name, "password_hash": "", "tags": ""})
        exchange = r"^(mqtt-subscription-.*|amq\.topic)$"
        permissions.append(
            {"user": name, "vhost": "/", "configure": "^mqtt-.*", "write": exchange, "read": exchange}
        )
        topics.append(
            {
                "user": name,
                "vhost": "/",
                "exchange": "amq.topic",
                "write": f"^{own % write if '%s' in own else own}$",
                "read": f"^{own % read if '%s' in own else own}$",
            }
        )
    vhosts = [{"name": "/"}]
    return {"vhosts": vhosts, "users": users, "permissions": permissions, "topic_permissions": topics}


class Node:
    """A node of the cluster, in namespaces of its own for mounts and processes."""

    def __init__(self, root: Path, number: int) -> None:
        self.port, self._distribution = free_port(), free_port()
        self._root, self._number = root, number
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, folder: Path) -> None:
        """Start it on what is in this folder; it answers later."""
        self._log = folder / f"r{self._number}.log"
        (folder / f"r{self._number}.conf").write_text(CONFIGURATION.format(port=self.port))
        (folder / "plugins").write_text("[rabbitmq_mqtt].\n")
        (self._root / "fleet").mkdir(exist_ok=True)
        variables = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/fleet",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"ek{self._number}@localhost",
            "RABBITMQ_CONFIG_FILE": f"/fleet/r{self._number}.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": "/fleet/plugins",
            "RABBITMQ_MNESIA_BASE": f"/fleet/d{self._number}",
            "RABBITMQ_DIST_PORT": str(self._distribution),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2"
            " -setcookie edgekit",
        }
        root = self._root
        steps = (
            f"mount --bind {folder} {root}/fleet",
            f"mount --rbind /dev {root}/dev",
            f"mount -t proc proc {root}/proc",
            f"exec chroot {root} sh -c 'exec /usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server'",
        )
        alone = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--", "sh", "-c")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*alone, " && ".join(steps)], env=variables, stdout=log, stderr=log
            )

    def wait(self, limit_s: float = 60.0) -> None:
        give_up_s = time.monotonic() + limit_s
        while time.monotonic() < give_up_s and self._process is not None and self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)
        sys.exit(f"node {self._number} does not start:\n{self._log.read_text(errors='replace')[-3000:]}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def running_manager(folder: FleetFolder, brokers: tuple[tuple[str, int], ...]) -> Iterator[Store]:
    """Run a manager that is connected to the first of these brokers that answers."""
    settings, authority = folder.read_settings(), Authority(folder.identity)
    repository = TufRepository(folder.repository, folder.repository_keys)
    stop, started = asyncio.Event(), threading.Event()
    with contextlib.closing(folder.open_store()) as store:
        shards = Shards()

        async def run() -> None:
            parts = ManagerParts(
                store=store,
                settings=settings,
                authority=authority,
                key=ManagerKey(folder),
                broker=None,
                decide=RolloutRunner(shards).turn,
                shards=shards,
                brokers=brokers,
                broker_folder=folder.path,
            )
            loops.append(asyncio.get_running_loop())
            started.set()
            await ControlLoop(parts, repository).run(stop)

        loops: list[asyncio.AbstractEventLoop] = []
        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        started.wait(10)
        try:
            yield store
        finally:
            loops[0].call_soon_threadsafe(stop.set)
            thread.join(20)


def offer(store: Store, version: str, devices: int) -> str:
    return roll_out(store, version, size_bytes=100_000, waves="100%", minimum=devices, soak_s=1.0)


def measure(
    fleet: FleetFolder, nodes: tuple[Node, Node], count: int, store_url: str
) -> list[tuple[str, object]]:
    """Return what each part has shown; with a database of its own there are two managers."""
    settings = FleetSettings(broker_port=nodes[1].port, store_url=store_url)
    fleet.write_settings(settings)
    authority, names = open_authority(fleet, settings), [f"sim-{number:03}" for number in range(count)]
    addresses = tuple(("127.0.0.1", node.port) for node in nodes)
    place = fleet.path / "cluster"
    place.mkdir()
    for path in (authority.certificate_path, *authority.pair("server")):
        shutil.copy(path, place / path.name)
    (place / "definitions.json").write_text(json.dumps(permit([*MANAGERS, *DOCTOR, *names])))
    for node in nodes:
        node.start(place)
    for node in nodes:
        node.wait()
    rows: list[tuple[str, object]] = []

    def note(name: str, value: object) -> None:
        rows.append((name, value))
        print(f"{name:55} {value}", flush=True)

    for found in probe_broker(authority, addresses):
        note(f"doctor: {found.check}", f"{found.effect}: {found.text}")
    TufRepository(fleet.repository, fleet.repository_keys).create(time.time())
    with contextlib.closing(fleet.open_store()) as store:
        members = enrol_simulated(store, authority, names, fleet.path / "devices")
    access = read_access(fleet, settings, addresses[::-1])
    with (
        running_manager(fleet, addresses) as store,
        running_manager(fleet, addresses[::-1]) if store_url else contextlib.nullcontext(),
        SimulatedFleet(members, access, behaviours=dict.fromkeys(names, FAST)) as devices,
    ):
        note("all online, s", devices.wait_until(lambda device: device.is_online, 60))
        rollout = offer(store, "1.0.0", count)
        note("release 1 on all, s", devices.wait_until(runs("1.0.0"), 60))
        for number, version, node in ((2, "2.0.0", nodes[1]), (1, "3.0.0", nodes[0])):
            wait_for_end(store, rollout, 30.0)
            windows = {device.desired.reconnect_s for device in devices.devices.values() if device.desired}
            note("window of reconnects, s", max(windows))
            rollout = offer(store, version, count)
            node.kill()
            note(f"node {number} killed: release on all, s", devices.wait_until(runs(version), 90))
            note("  all online again, s later", devices.wait_until(lambda device: device.is_online, 60))
            note("  lost desired states", count - devices.count(runs(version)))
            node.start(place)
            node.wait()
    return rows


def runs(version: str) -> Callable[[object], bool]:
    return lambda device: device.versions.get(MODEL) == version  # type: ignore[attr-defined]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--devices", type=int, default=100)
    parser.add_argument("--managers", type=int, choices=(1, 2), default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("apt-get") is None or shutil.which("unshare") is None:
        sys.exit("skipped: needs root, apt-get and unshare")
    root = unpack_rabbitmq()
    limit_time(LIMIT_S)
    with tempfile.TemporaryDirectory(prefix="edgekit-rabbitmq-") as name:
        nodes = Node(root, 1), Node(root, 2)
        with contextlib.ExitStack() as parts:
            for node in nodes:
                parts.callback(node.kill)
            server = parts.enter_context(PostgresqlServer()) if options.managers == 2 else None
            url = "" if server is None else server.url()
            rows = measure(FleetFolder(Path(name)), nodes, options.devices, url)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
