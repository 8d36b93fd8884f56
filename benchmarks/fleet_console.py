"""Every page of the console over a large store, while devices report.

    scripts/python -m benchmarks.fleet_console [--devices 100000]

Fills a store (60 s for 100,000 devices), serves the console on loopback, and asks for each page again and
again, while another thread writes reports as the manager does. Figures are what the client sees: from the
request to the last byte of the answer, compressed. A live update is counted from the commit of a change to
the last byte of the page that an event made the client fetch.
"""

import gzip
import html
import http.client
import logging
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks.results import make_parser, write_json
from tests.fleet.console.conftest import Served
from tests.fleet.console.rollout_sample import add_rollout
from tests.fleet.filled_store import fill_store
from tests.fleet.simulated_rollout import BAD_MODELS, CLEAN

from edgekit_cli.fleet.up import prepare_interpreter
from edgekit_fleet.access import users
from edgekit_fleet.access.guard import LOGIN
from edgekit_fleet.access.logins import open_login
from edgekit_fleet.console.fleet_page import warm_up
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store, update_many
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.tables import DeviceRow

SELECTORS = {
    "a tag": "site=lyon",
    "a class and not a tag": "class=jetson and not beta",
    "a version": "model:detector=1.4.0",
    "the version of most": "model:detector=1.5.0",
    "two of many": "model:detector=1.5.0 and runtime=0.1.0",
    "that version and not a tag": "model:detector=1.5.0 and site!=lyon",
    "all but a tag": "site!=lyon",
    "part of a name": "01234",
    "nothing": "site=nowhere",
}
PLANS = {"a name": "name=lyon-0001*", "a tag": "site=lyon", "all": "all"}
SMALL_ROLLOUT, LARGE_ROLLOUT = 1000, 10_000  # devices, which are connected
REPORTS_A_SECOND = 200  # of 10,000 devices that report every 50 s
GOAL_MS, GOAL_KB, GOAL_LIVE_MS = 100.0, 60.0, 300.0


class Reports:
    """Writes what devices report, in batches as the manager does, until it is closed."""

    def __init__(self, store: Store, a_second: int) -> None:
        with store.snapshot() as session:
            names = [
                name for (name,) in session.query(DeviceRow.name).filter(DeviceRow.is_online).limit(10_000)
            ]
            reported = session.query(DeviceRow.reported).filter(DeviceRow.is_online).first()[0]
        self._store, self._names, self._report, self._count = store, names, reported, a_second // 10
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> "Reports":
        if self._count:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._count:
            self._thread.join()

    def _write(self) -> None:
        draw, number = random.Random(2), 0  # noqa: S311
        while not self._stop.wait(0.1):
            number += 1
            rows = [
                {"name": name, "last_seen_at": time.time(), "sequence": number, "reported": self._report}
                for name in draw.sample(self._names, self._count)
            ]
            with self._store.transaction() as session:
                update_many(session, DeviceRow, rows, keys=("name",))


def list_pages(store: Store) -> dict[str, str]:
    with store.snapshot() as session:
        name = session.query(DeviceRow.name).filter_by(status="diverged").first()[0]
        far = (
            session.query(DeviceRow.name)
            .filter_by(status="converged")
            .order_by(DeviceRow.name.desc())
            .first()[0]
        )
    return {
        "fleet": "/",
        "devices": "/devices",
        **{f"devices by {what}": f"/devices?selector={quote(text)}" for what, text in SELECTORS.items()},
        "devices, last page": f"/devices?after={quote('converged:0:' + far[:-1])}",
        "devices by name": "/devices?sort=name&after=m",
        "devices silent": "/devices?special=silent",
        "device": f"/devices/{name}",
        "releases": "/releases",
        "release": "/releases/2026-11-16.1",
        "rollouts": "/rollouts",
        "rollout, stopped": "/rollouts/bad",
        "rollout, running": "/rollouts/good",
        "rollout, its devices": "/rollouts/bad/devices",
        "model health": "/health",
        "audit": "/audit",
        "audit of an action": "/audit?action=device.enrol",
        "settings": "/settings",
        "tokens": "/settings/tokens",
        "enrolment": "/settings/codes",
        "fleet settings": "/settings/fleet",
    }


def fetch(connection: http.client.HTTPConnection, path: str, cookie: str) -> tuple[float, int, bytes]:
    begin_s = time.perf_counter()
    connection.request("GET", path, headers={"accept-encoding": "gzip", "cookie": cookie})
    response = connection.getresponse()
    data = response.read()
    took_ms = (time.perf_counter() - begin_s) * 1000
    assert response.status == 200, (path, response.status, data[:300])
    return (
        took_ms,
        len(data),
        gzip.decompress(data) if response.getheader("content-encoding") == "gzip" else data,
    )


def measure_pages(port: int, pages: dict[str, str], cookie: str, repeats: int) -> dict[str, dict[str, float]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    found = {}
    for name, path in pages.items():
        fetch(connection, path, cookie)  # opens the connections of the store's pool
        times, size = [], 0
        for _ in range(repeats):
            took_ms, size, _ = fetch(connection, path, cookie)
            times.append(took_ms)
        times.sort()
        found[name] = {
            "p50_ms": statistics.median(times),
            "p95_ms": times[min(len(times) - 1, round(0.95 * len(times)))],
            "kB": size / 1000,
        }
        print(
            f"{name:34} {found[name]['p50_ms']:8.1f} {found[name]['p95_ms']:8.1f} {found[name]['kB']:8.1f}",
            flush=True,
        )
    return found


def measure_work(port: int, work: dict[str, str], cookie: str) -> dict[str, dict[str, float]]:
    """Return of pages that the server still works on when they are there: each answer, and all of it.

    Meanwhile another client asks for the first page.
    """
    found = {}
    for name, path in work.items():
        is_whole = threading.Event()
        with ThreadPoolExecutor(1) as other:
            first_page = other.submit(fetch_until, port, "/", cookie, is_whole)
            begin_s = time.perf_counter()
            times = fetch_whole(port, path, cookie)
            whole_ms = (time.perf_counter() - begin_s) * 1000
            is_whole.set()
            beside = first_page.result()
        found[name] = {"slowest_ms": max(times), "whole_ms": whole_ms, "beside_ms": beside}
        print(
            f"{name:34} answers at most {max(times):.0f} ms, whole after {whole_ms:.0f} ms;"
            f" the first page meanwhile {statistics.median(beside):.0f}, at most {max(beside):.0f} ms",
            flush=True,
        )
    return found


def fetch_whole(port: int, path: str, cookie: str) -> list[float]:
    """Return how long each answer took until the page was whole."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times = []
    while path:
        took_ms, _, page = fetch(connection, path, cookie)
        times.append(took_ms)
        again = re.search(rb'class="unfinished"[^>]* hx-get="([^"]+)"', page)
        path = html.unescape(again[1].decode()) if again else ""
        time.sleep(0.3 if path else 0)  # as the page does
    return times


def fetch_until(port: int, path: str, cookie: str, is_over: threading.Event) -> list[float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times = [fetch(connection, path, cookie)[0]]
    while not is_over.wait(0.02):
        times.append(fetch(connection, path, cookie)[0])
    return times


def measure_live(served: Served, cookie: str, repeats: int) -> dict[str, float]:
    """Return how long a change takes to an open rollout page and an open list of devices."""
    times = []
    pages = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    draw = random.Random(3)  # noqa: S311
    for number in range(repeats):
        seen = served.console.watcher.read_position()
        stream = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
        stream.request("GET", f"/live?seen={seen}", headers={"cookie": cookie})
        response = stream.getresponse()
        time.sleep(draw.uniform(0.3, 0.4))
        with served.store.transaction() as session:
            audit.record(session, "bench", "release.make", f"live-{number}")
        begin_s = time.perf_counter()
        while not response.readline().startswith(b"event: audit"):
            pass
        text = fetch(pages, "/audit", cookie)[2]
        assert f"live-{number}".encode() in text
        times.append((time.perf_counter() - begin_s) * 1000)
        stream.close()
    times.sort()
    return {
        "p50_ms": statistics.median(times),
        "p95_ms": times[min(repeats - 1, round(0.95 * repeats))],
        "max_ms": times[-1],
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--devices", type=int, default=100_000)
    parser.add_argument("--online", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--reports-a-second", type=int, default=REPORTS_A_SECOND)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    result: dict[str, Any] = vars(arguments) | {"json": None}
    with tempfile.TemporaryDirectory() as path:
        folder = FleetFolder(Path(path))
        folder.write_settings(FleetSettings())
        store = folder.open_store()
        begin_s = time.monotonic()
        in_rollouts = 2 * SMALL_ROLLOUT + LARGE_ROLLOUT
        fill_store(store, arguments.devices - in_rollouts, online=arguments.online, hours=24)
        add_rollout(
            store, "bad", BAD_MODELS["-5 points, no labels"], devices=SMALL_ROLLOUT, at=time.time() - 50_000
        )
        add_rollout(store, "good", CLEAN, devices=SMALL_ROLLOUT, at=time.time() - 4000, days=0.04)
        add_rollout(store, "large", CLEAN, devices=LARGE_ROLLOUT, at=time.time() - 90_000, days=0.9)
        with store.transaction() as session:
            users.add_user(session, "bench", "a password of the bench", "admin", actor="bench")
            login = open_login(session, "bench", time.time())
        store.close()
        print(f"{arguments.devices} devices in the store after {time.monotonic() - begin_s:.0f} s")
        served = Served(folder)
        cookie = f"{LOGIN}_{served.port}={login}"
        warm_up(served.store)  # as at a start
        prepare_interpreter()
        try:
            first = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
            result["first page after the start, ms"], _, _ = fetch(first, "/", cookie)
            print(f"first page after the start: {result['first page after the start, ms']:.0f} ms")
            print(f"{'page':34} {'p50 ms':>8} {'p95 ms':>8} {'kB':>8}")
            result["live at rest"] = measure_live(served, cookie, arguments.repeats)
            with Reports(served.store, arguments.reports_a_second):
                work = {"first view of 10,000 devices": "/rollouts/large"}
                plan = "/rollouts/new?release=2026-11-16.1&selector="
                work |= {f"plan for {what}": plan + quote(text) for what, text in PLANS.items()}
                result["work"] = measure_work(served.port, work, cookie)
                result["pages"] = measure_pages(
                    served.port, list_pages(served.store), cookie, arguments.repeats
                )
        finally:
            served.close()
    live = result["live at rest"]
    print(
        f"live update: p50 {live['p50_ms']:.0f} ms, p95 {live['p95_ms']:.0f} ms, max {live['max_ms']:.0f} ms"
    )
    write_json(arguments.json, result)
    slow = [name for name, one in result["pages"].items() if one["p95_ms"] > GOAL_MS or one["kB"] > GOAL_KB]
    slow += [
        name for name, one in result["work"].items() if max(one["slowest_ms"], *one["beside_ms"]) > GOAL_MS
    ]
    print(f"above {GOAL_MS:.0f} ms or {GOAL_KB:.0f} kB: {', '.join(slow) or 'none'}")
    return bool(slow or live["p95_ms"] > GOAL_LIVE_MS)


if __name__ == "__main__":
    sys.exit(main())
