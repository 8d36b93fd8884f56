"""Bytes on the wire of a package over 64 kbit/s that is cut every 30 s, and how well a cap is held.

    scripts/python benchmarks/fleet_download.py [--json F]

About 200 s, ends by itself after 280 s; needs root. The fleet's web server and the agent's downloads run in
two network namespaces with an emulated link between them, a pair for each row, all at the same time. Each
download looks its package up by TUF first. Bytes are those of the device's interface: with headers of IP and
TCP, with what was sent twice; `tls` is that without these headers, `content` what the package itself has.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from edgekit_fleet.identity.authority import open_authority
from edgekit_fleet.releases.repository import NewTarget, TufRepository
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.web.server import serve_devices
from edgekit_host.emulation.namespace_link import SERVER_HOST
from edgekit_host.emulation.testbed import Testbed
from edgekit_runtime.agent.artifacts.download import Downloader, DownloadLimits
from edgekit_runtime.agent.artifacts.repository import RepositoryClient
from edgekit_runtime.agent.membership import make_context
from edgekit_runtime.errors import TransportError
from results import make_parser, write_json

PORT = 8443
LIMIT_S = 280
CUT_EVERY_S, CUT_S = 30.0, 3.0
PEAK_S = 10
HEADER_BYTES = 52  # of IP and TCP with time stamps; those of the few SYNs are longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A download.

    Attributes:
        name: of the row, and of the package.
        package_bytes: content that cannot be compressed.
        link_mbit_s: both ways.
        cut: what a cut does: nothing arrives for 3 s; then connections are there, or broken.
        cap_bytes_per_s: of the agent.
    """

    name: str
    package_bytes: int
    link_mbit_s: float = 20.0
    cut: Literal["", "pause", "break"] = ""
    cap_bytes_per_s: float | None = None


ROWS = (
    Row(name="pause", package_bytes=1_100_000, link_mbit_s=0.064, cut="pause"),
    Row(name="break", package_bytes=1_100_000, link_mbit_s=0.064, cut="break"),
    Row(name="cap-64-kbit", package_bytes=480_000, cap_bytes_per_s=8e3),
    Row(name="cap-1-mbit", package_bytes=5_000_000, cap_bytes_per_s=125e3),
    Row(name="cap-8-mbit", package_bytes=40_000_000, cap_bytes_per_s=1e6),
)


def read_wire() -> dict[str, int]:
    """Return what the interface of this namespace has received and sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, text = line.strip().partition(":")
        if name == "edgekit0":
            numbers = [int(number) for number in text.split()]
            return {"received": numbers[0], "packets": numbers[1], "sent": numbers[8]}
    raise OSError("no interface edgekit0; this runs in the namespace of the device")


class PeakRate:
    """The most that came in any 10 s."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        counts = deque([read_wire()["received"]], maxlen=PEAK_S + 1)
        while True:
            time.sleep(1.0)
            counts.append(read_wire()["received"])
            self.bytes_per_s = max(self.bytes_per_s, (counts[-1] - counts[0]) / PEAK_S)


def fetch(folder: Path, row: Row) -> dict[str, Any]:
    """Look the package up, download it, and return what went over the wire; tries again as the agent does."""
    context = make_context((folder / "authority.pem").read_text())
    downloader = Downloader(context, DownloadLimits(bytes_per_s=row.cap_bytes_per_s))
    url, root = f"https://{SERVER_HOST}:{PORT}/artifacts", (folder / "root.json").read_text()
    offer = RepositoryClient(folder / f"tuf-{row.name}", url, root, downloader).find(
        f"x86-64/{row.name}.edgepkg", "x86-64", 0.0
    )
    assert offer is not None
    before, begin_s, failures, peak = read_wire(), time.monotonic(), 0, PeakRate()
    path, received = folder / f"{row.name}.fetched", list[int]()
    while not path.exists():
        try:
            downloader.fetch(
                *(offer.url, path, offer.size_bytes),
                sha256=offer.sha256,
                count=received.append,
                stop=threading.Event(),
            )
        except TransportError as error:  # noqa: PERF203  # each try takes seconds
            failures += 1
            print(error, file=sys.stderr)
            time.sleep(2.0)
    took_s, after = time.monotonic() - begin_s, read_wire()
    used = {name: after[name] - before[name] for name in after}
    return {
        "took_s": took_s,
        "failures": failures,
        "content": sum(received),
        "tls": used["received"] - HEADER_BYTES * used["packets"],
        **used,
        "metadata": before["received"],
        "peak_bytes_per_s": peak.bytes_per_s,
        "is_whole": hashlib.sha256(path.read_bytes()).hexdigest() == offer.sha256,
    }


def serve(folder: Path, name: str) -> None:
    fleet = FleetFolder(folder)
    settings = fleet.read_settings()
    with serve_devices(fleet.open_store(), fleet, settings, open_authority(fleet, settings)):
        (folder / f"ready-{name}").touch()
        threading.Event().wait()


def run(folder: Path, row: Row) -> dict[str, Any]:
    """Emulate the link of a row, and return what its download measured."""
    with Testbed(kind="namespaces") as testbed:
        itself = [sys.executable, __file__, "--folder", str(folder), "--row", row.name]
        server = testbed.spawn("server", [*itself, "--serve"], output="log")
        while not (folder / f"ready-{row.name}").exists():
            if server.wait(0.1) is not None:
                sys.exit(f"{row.name}: the web server ended {server.explain_end()}")
        set_link(testbed, row)
        device, cuts = testbed.spawn("device", itself), 0
        while device.wait(CUT_EVERY_S) is None:
            if row.cut:
                cuts += 1
                cut(testbed, row)
        if device.wait(1.0) != 0:
            sys.exit(f"the download ended {device.explain_end()}")
        return {"cuts": cuts, **json.loads(device.output)}


def set_link(testbed: Testbed, row: Row) -> None:
    testbed.set_link(up_mbit_s=row.link_mbit_s, down_mbit_s=row.link_mbit_s, rtt_ms=60)


def cut(testbed: Testbed, row: Row) -> None:
    testbed.block()
    if row.cut == "break":
        testbed.spawn("device", ["ss", "--kill", "dst", SERVER_HOST]).wait(10.0)
    time.sleep(CUT_S)
    set_link(testbed, row)


def prepare(folder: Path) -> None:
    """Make a fleet whose repository offers the packages."""
    fleet = FleetFolder(folder)
    settings = FleetSettings(host=SERVER_HOST, names=(SERVER_HOST,), web_port=PORT)
    fleet.write_settings(settings)
    authority = open_authority(fleet, settings)
    fleet.open_store().close()
    repository, targets = TufRepository(fleet.repository, fleet.repository_keys), []
    repository.create(time.time())
    for row in ROWS:
        source = folder / f"{row.name}.edgepkg"
        source.write_bytes(os.urandom(row.package_bytes))
        targets.append(NewTarget(device_class="x86-64", name=source.name, source=source))
    repository.publish(targets, time.time())
    (folder / "authority.pem").write_text(authority.certificate_path.read_text())
    (folder / "root.json").write_bytes((fleet.repository / "metadata" / "1.root.json").read_bytes())


def show(row: Row, found: dict[str, Any]) -> None:
    size = row.package_bytes
    shares = {name: round(found[name] / size, 4) for name in ("content", "tls", "received", "sent")}
    text = f"{row.name:12} {size:>9} bytes, {found['took_s']:6.1f} s, {found['cuts']} cuts, {shares}"
    if row.cap_bytes_per_s is not None:
        of_cap = {
            "content": round(found["content"] / found["took_s"] / row.cap_bytes_per_s, 4),
            "received": round(found["received"] / found["took_s"] / row.cap_bytes_per_s, 4),
            "peak": round(found["peak_bytes_per_s"] / row.cap_bytes_per_s, 2),
        }
        text += f", of the cap {of_cap}"
    text += f", metadata {found['metadata']}, failures {found['failures']}"
    print(text if found["is_whole"] else f"{text}: WRONG CONTENT", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", help="names of some rows, with commas")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        (row,) = (row for row in ROWS if row.name == options.row)
        if options.serve:
            serve(options.folder, row.name)
        else:
            print(json.dumps(fetch(options.folder, row)))
        return
    rows = [row for row in ROWS if options.rows is None or row.name in options.rows.split(",")]
    signal.alarm(LIMIT_S)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(rows)) as threads:
        prepare(Path(name))
        results = list(threads.map(lambda row: run(Path(name), row), rows))
    for row, found in zip(rows, results, strict=True):
        show(row, found)
    write_json(options.json, [{**asdict(row), **found} for row, found in zip(rows, results, strict=True)])


if __name__ == "__main__":
    main()
