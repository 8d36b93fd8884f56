"""What a session with a server costs where the choice is local: beside the plain session, on loopback.

    scripts/python benchmarks/offload_overhead.py [--json FILE]

About 15 s. A small real model (`models/tiny/digits_cnn.onnx`), whose cut table says that the device is
faster than any server, so the link is not probed again once the server has proved itself. Both sessions take
turns of 200 requests. On a busy machine the p10 says more.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from edgekit_offload.packaging.submodels import attach_plans
from edgekit_offload.partition.split import whole_upload
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_options import OffloadOptions, write_offload_options
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.plain_package import write_plain_package
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer
from results import machine, make_parser, write_json
from serving import MODEL, serving

TURN, TURNS = 200, 40


def write_planned(folder: Path) -> Path:
    """Return the path of a planned package whose plans say that the device is fastest."""
    keys = folder / "keys"
    generate_key("default", keys)
    sign = load_signer(folder=keys)
    plain = write_plain_package(MODEL, name="digits", target="x86-64", folder=folder, sign=sign)
    plans = (
        OffloadPlan("local", PlanCosts(1e-5)),
        OffloadPlan("raw", PlanCosts(1e-3, 1e-3, 4000.0, 40.0), tail="raw.tail"),
    )
    made = folder / "planned"
    made.mkdir()
    with read_package(plain, TrustStore.from_folder(keys)) as package:
        splits = {"raw": whole_upload(MODEL.read_bytes())}
        return attach_plans(package, splits, CutTable(plans), folder=made, sign=sign)


def time_turn(session: Session, feeds: dict[str, Any]) -> list[float]:
    found = []
    for _ in range(TURN):
        began_s = time.perf_counter()
        session.run(feeds)
        found.append(time.perf_counter() - began_s)
    return found


def measure(folder: Path) -> dict[str, Any]:
    os.environ["EDGEKIT_HOME"] = str(folder / "home")
    os.environ["EDGEKIT_CACHE"] = str(folder / "cache")
    package = write_planned(folder)
    trust = TrustStore.from_folder(folder / "keys")
    plain = open_session(package, trust=trust)
    with serving(folder, words=("--tails", str(package))) as service:
        write_offload_options(OffloadOptions(f"127.0.0.1:{service.port}"))
        offloading = open_session(package, trust=trust)
        assert isinstance(offloading, RemoteSession)
        offloading.wait_for_probe(10)
        feeds = {one.name: np.zeros([1, *one.shape[1:]], one.dtype) for one in plain.inputs}  # type: ignore[list-item]
        times: dict[str, list[float]] = {"plain": [], "with a server": []}
        for _ in range(TURNS):
            for name, session in (("plain", plain), ("with a server", offloading)):
                times[name] += time_turn(session, feeds)
        counts = offloading.counts
        assert counts.local == TURN * TURNS, counts
        offloading.close()
    plain.close()
    rows = {
        name: {f"p{share}_us": float(np.percentile(found, share)) * 1e6 for share in (10, 50, 99)}
        for name, found in times.items()
    }
    added_us = rows["with a server"]["p10_us"] - rows["plain"]["p10_us"]
    return {"rows": rows, "added_p10_us": added_us, "machine": machine()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    print(f"{'session':16}{'p10 us':>10}{'p50 us':>10}{'p99 us':>10}")
    for name, row in found["rows"].items():
        print(f"{name:16}" + "".join(f"{value:10.1f}" for value in row.values()))
    print(f"added at p10: {found['added_p10_us']:.1f} us")
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
