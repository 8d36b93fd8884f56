"""How soon a device and the console say why a device is away or refuses: six situations, real processes.

    scripts/python -m benchmarks.fleet_ends [--only NAME]

A fleet with mosquitto runs on free ports of loopback. Each device is a folder with `edgekit-device agent`.
For each situation the time is measured until `edgekit-device fleet status` has a sentence, and until the page
of the device in the console has one, both read in turns: so each time includes the start of `fleet status`,
0.5 s at rest. The clock of 2015 needs libfaketime (`apt install libfaketime`), the small disk needs root, for
a tmpfs. Ends by itself; the exit code is 1 if a sentence is missing after a minute.
"""

import contextlib
import html
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

from benchmarks.results import make_parser
from tests.waiting import wait_for

from edgekit_fleet.access import users
from edgekit_fleet.access.guard import LOGIN
from edgekit_fleet.access.logins import open_login
from edgekit_fleet.console.app import make_app
from edgekit_fleet.console.shell import Console
from edgekit_fleet.demo.running_manager import running_manager
from edgekit_fleet.operations import devices
from edgekit_fleet.store.due import mark_due
from edgekit_fleet.store.fleet_folder import FleetSettings
from edgekit_fleet.store.tables import WantedModelRow
from edgekit_fleet.web.server import WebServer
from edgekit_runtime.agent.documents import DesiredModel
from edgekit_runtime.dataclass_json import to_plain

LIMIT_S = 60.0
FAKETIME = Path(f"/usr/lib/{os.uname().machine}-linux-gnu/faketime/libfaketime.so.1")


class Device:
    def __init__(
        self, site: SimpleNamespace, name: str, folder: Path | None = None, **variables: str
    ) -> None:
        self.site, self.name = site, name
        self.home = site.folder / (str(folder) if folder else name)
        (self.home / "state").mkdir(parents=True)
        places = {f"EDGEKIT_{part}": str(self.home / part.lower()) for part in ("HOME", "STATE", "CACHE")}
        self.variables = {**os.environ, **places, "EDGEKIT_TARGET": "x86-64", **variables}
        self.agent: subprocess.Popen[bytes] | None = None

    def run(self, *words: str) -> str:
        command = [sys.executable, "-m", "edgekit_runtime.cli", *words]
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def enrol(self) -> None:
        fleet = self.site.fleet
        (code,) = devices.invite(
            fleet.store, fleet.settings, fleet.authority, (self.name,), actor="bench", target="x86-64"
        )
        self.run("enroll", "--code", code.code)

    def start(self) -> "Device":
        log = (self.home / "agent.log").open("ab")
        command = [sys.executable, "-m", "edgekit_runtime.cli", "agent"]
        self.agent = subprocess.Popen(command, env=self.variables, stderr=log)
        self.site.agents.append(self.agent)
        return self

    def join(self, size_bytes: int = 1 << 20) -> "Device":
        """Enrol, start, and get a document, so that reconnects take seconds as in a fleet that works."""
        self.enrol()
        self.start()
        wait_for(lambda: devices.describe(self.site.fleet.store, self.name).summary.is_online, "the hello")
        model = DesiredModel(
            model="kws",
            version="1.0.0",
            manifest_sha256="0" * 64,
            path="x86-64/kws",
            size_bytes=size_bytes,
            sha256="1" * 64,
            execution=f"e-{self.name}",
            release="r",
            rollout="r1",
        )
        with self.site.fleet.store.transaction() as session:
            row = {"device": self.name, "model": "kws", "rollout": "r1", "document": to_plain(model)}
            session.merge(WantedModelRow(**row))
            mark_due(session, [self.name])
        wait_for(lambda: "desired 1.0.0" in self.run("fleet", "status"), "the document")
        return self

    def page(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.site.port, timeout=10)
        connection.request("GET", f"/devices/{self.name}", headers={"cookie": self.site.cookie})
        text = connection.getresponse().read().decode()
        found = re.search(r'<p class="lead" role="status">(.*?)</p>', text, re.DOTALL)
        return html.unescape(found[1]) if found else text


def stop(site: SimpleNamespace) -> tuple[Device, str, str]:
    device = Device(site, "stopped").join()
    device.agent.send_signal(signal.SIGTERM)
    return device, "no agent runs; the fleet was last reached at", "it is offline, and was last seen"


def revoke(site: SimpleNamespace) -> tuple[Device, str, str]:
    device = Device(site, "revoked").join()
    devices.revoke(site.fleet.store, device.name, "bench", "stolen")
    return device, "the fleet has revoked this device", "was revoked at"


def enrol_again(site: SimpleNamespace) -> tuple[Device, str, str]:
    device = Device(site, "again").join()
    devices.revoke(site.fleet.store, device.name, "bench", "by mistake")
    wait_for(lambda: "not connected" in device.run("fleet", "status"), "the end")
    device.enrol()
    return device, "\n  connected since", "again: kws: it runs nothing and should run 1.0.0, but 1.0.0"


def copy(site: SimpleNamespace) -> tuple[Device, str, str]:
    device = Device(site, "copied").join()
    other = Device(site, "copied", Path("copy"))
    shutil.copytree(device.home, other.home, dirs_exist_ok=True)
    other.start()
    return device, "the fleet says: at", "two machines use the identity"


def old_clock(site: SimpleNamespace) -> tuple[Device, str, str]:
    device = Device(site, "y2015")
    device.enrol()
    device.variables |= {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "@2015-06-01 12:00:00"}
    device.variables["FAKETIME_DONT_FAKE_MONOTONIC"] = "1"
    device.start()
    return device, "the clock says 2015-06-01", "Its clock says 2015-06-01"


def small_disk(site: SimpleNamespace) -> tuple[Device, str, str]:
    device = Device(site, "small")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", device.home / "state"], check=True)
    site.stack.callback(subprocess.run, ["umount", "-l", device.home / "state"], check=False)
    device.join(size_bytes=60 << 20)
    return device, "refused: the update needs", "refused: the update needs"


SITUATIONS: dict[str, tuple[Callable[[SimpleNamespace], tuple[Device, str, str]], Callable[[], bool]]] = {
    "stop in order": (stop, lambda: True),
    "revoke": (revoke, lambda: True),
    "enrol again": (enrol_again, lambda: True),
    "copied identity": (copy, lambda: True),
    "clock of 2015": (old_clock, FAKETIME.exists),
    "small disk": (small_disk, lambda: os.geteuid() == 0),
}


@contextlib.contextmanager
def running_site() -> Iterator[SimpleNamespace]:
    """Yield a fleet with its console, and an administrator's cookie."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = stack.enter_context(running_manager(folder / "fleet", folder / "keys", ("127.0.0.1",)))
        console = Console(fleet.store, fleet.folder, FleetSettings())
        server = stack.enter_context(WebServer(make_app(console), "127.0.0.1", 0, None, option="--port"))
        with fleet.store.transaction() as session:
            users.add_user(session, "ada", "correct horse battery", "admin", actor="bench")
            session.flush()
            cookie = f"{LOGIN}_{server.port}={open_login(session, 'ada', time.time())}"
        site = SimpleNamespace(folder=folder, fleet=fleet, port=server.port, cookie=cookie, agents=[])
        site.stack = stack
        try:
            yield site
        finally:
            for agent in site.agents:
                agent.kill()
                agent.wait()


def main() -> int:
    missing = 0
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=SITUATIONS)
    chosen = parser.parse_args().only
    with running_site() as site:
        for name, (cause, is_possible) in SITUATIONS.items():
            if chosen not in (None, name):
                continue
            if not is_possible():
                print(f"{name}: left out, see the head of this file")
                continue
            device, words, console_words = cause(site)
            begin = time.monotonic()
            times: dict[str, float] = {}
            texts = {"device": "", "console": ""}
            while len(times) < len(texts) and time.monotonic() - begin < LIMIT_S:
                texts = {"device": device.run("fleet", "status"), "console": device.page()}
                for side, expected in (("device", words), ("console", console_words)):
                    if expected in texts[side]:
                        times.setdefault(side, time.monotonic() - begin)
            missing += len(texts) - len(times)
            for side, text in texts.items():
                shown = f"{times[side]:.1f} s" if side in times else f"NOT within {LIMIT_S:.0f} s"
                print(f"{name}, {side}: {shown}\n    {text.strip()}", flush=True)
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
