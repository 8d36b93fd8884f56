"""Memory of an idle agent: after its start, after an update, and a minute later.

    scripts/python -m benchmarks.fleet_agent_memory

Real: mosquitto, the manager, a service with a model of a few hundred bytes, and `edgekit-device agent`, which
downloads, verifies and installs two versions and follows their confirmation. The modules are compiled before,
as pip leaves them. PSS counts a page that processes share by its share, so that the manager here makes it
smaller. With `--python ENV/bin/python`, an environment that nobody else uses and that has the packages of a
device (`requirements/device.txt`), agent and service share with each other only, as on a device. Two minutes.
"""

import contextlib
import logging
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.processes import list_children, read_memory
from benchmarks.results import make_parser, write_json
from tests.agent.site import Site
from tests.fleet.conftest import Fleet
from tests.free_port import free_port
from tests.runtime.conftest import maker as make_maker
from tests.waiting import wait_for

from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings

GOAL_MB = 30.0
SETTLE_S, LATER_S = 5.0, 60.0


class Peak:
    """The most that the agent and its children take together, sampled ten times a second."""

    def __init__(self, pid: int) -> None:
        self.mb = 0.0
        self._pid, self._stop = pid, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            total = 0.0
            for pid in (self._pid, *list_children(self._pid)):
                with contextlib.suppress(OSError, KeyError):  # it has ended
                    total += read_memory(pid)["Pss"] / 1e6
            self.mb = max(self.mb, total)


def run(folder: Path, python: str) -> list[dict[str, object]]:
    """Return one row a moment; agent and service run by `python`."""
    settings = FleetSettings(broker_port=free_port(), web_port=free_port())
    rows: list[dict[str, object]] = []
    with Fleet(FleetFolder(folder / "fleet"), settings).up() as fleet:
        site = Site(fleet, make_maker.__wrapped__(), folder)
        site.command = lambda *words: [python, "-m", "edgekit_runtime.cli", *words]
        site.variables["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
        site.variables.pop("PYTHONDONTWRITEBYTECODE", None)
        try:
            site.enrol()
            site.serve()
            first = site.start("agent")
            wait_for(lambda: site.reported() is not None, f"the first report; {site.log()}", 30)
            site.want("1.0.0")  # compiles what updates need
            site.wait_status("converged", ["succeeded"], limit_s=60)
            first.terminate()
            first.wait(20)
            before = site.reported()
            agent = site.start("agent")
            wait_for(lambda: site.reported() != before, f"a report; {site.log()}", 30)

            def take(moment: str, peak_mb: float = 0.0) -> None:
                memory = {kind: size / 1e6 for kind, size in read_memory(agent.pid).items()}
                row = {"moment": moment, **memory, "children": len(list_children(agent.pid))}
                rows.append({**row, "peak_with_children": peak_mb} if peak_mb else row)

            time.sleep(SETTLE_S)
            take("idle after its start")
            site.want("2.0.0")
            with Peak(agent.pid) as peak:
                site.wait_status("converged", ["succeeded"], limit_s=60)
                time.sleep(1.0)
                wait_for(lambda: site.reported().models[0].version == "2.0.0", "the update", 30)
            time.sleep(SETTLE_S)
            take("idle after an update", peak.mb)
            time.sleep(LATER_S)
            take("a minute later")
        finally:
            site.end()
    return rows


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("gmqtt").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        rows = run(Path(folder), arguments.python)
    print(f"{arguments.python}; MB; goal: PSS of an idle agent at most {GOAL_MB:g}")
    for row in rows:
        most = row.get("peak_with_children")
        peak = "" if most is None else f", at most {most:.1f} PSS with its children"
        print(
            f"{row['moment']:22} PSS {row['Pss']:5.1f}, RSS {row['Rss']:5.1f}, private and written"
            f" {row['Private_Dirty']:5.1f}; {row['children']} children{peak}"
        )
    write_json(arguments.json, rows)
    return int(any(float(str(row["Pss"])) > GOAL_MB for row in rows))


if __name__ == "__main__":
    sys.exit(main())
