r"""What the memory of an idle service is made of, beside what its libraries take without it.

    scripts/python benchmarks/service_memory.py \
        [--device-python DEVICE_ENV/bin/python]

Each line is a process of its own, which does what the lines before did too: Python, numpy, onnxruntime, one
session of the small model after 20 runs, asyncio with what else of the standard library a service needs, and
the service with that model. PSS shares pages with all processes that map them at that moment (every Python on
this machine); RSS does not, so it is what PSS would be for the only Python of a device. MB are 10^6 bytes.
"""

import telemetry_off  # noqa: F401

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from edgekit_toolkit.packaging.signing_keys import load_signer
from processes import read_memory
from results import make_parser
from serving import INPUT, MODEL, SHAPE, serving, write_signed

SESSION = f"""
import numpy, onnxruntime
settings = onnxruntime.SessionOptions()
settings.intra_op_num_threads = settings.inter_op_num_threads = 1
settings.enable_mem_pattern = False
session = onnxruntime.InferenceSession({str(MODEL)!r}, settings, providers=["CPUExecutionProvider"])
feed = {{session.get_inputs()[0].name: numpy.zeros((1, 1, 8, 8), numpy.float32)}}
for _ in range(20):
    session.run(None, feed)
"""
FLOOR = {
    "python": "",
    "numpy": "import numpy",
    "onnxruntime": "import numpy, onnxruntime",
    "session": SESSION,
    "asyncio, hashlib, httptools": f"{SESSION}\nimport argparse, asyncio, hashlib, httptools, json, logging",
}
KINDS = ("Pss", "Rss", "Anonymous")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device-python", default=sys.executable)
    python = parser.parse_args().device_python
    found = {name: measure_floor(python, code) for name, code in FLOOR.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sign, feeds = load_signer(folder=folder / "keys"), {INPUT: np.zeros(SHAPE, np.float32)}
        package = write_signed(folder, "small", MODEL.read_bytes(), feeds, sign)
        with serving(folder, package, python=python) as service:
            time.sleep(3)  # after the first look for sensors
            found["service"] = read_kinds(service.pid)
            largest = read_mappings(service.pid)
    print(json.dumps({"python": python, "mb": found, "service_largest_mappings_rss_mb": largest}, indent=2))


def measure_floor(python: str, code: str) -> dict[str, float]:
    """Return the memory of a process that ran `code` and waits."""
    waiting = f"{code}\nprint(flush=True)\nimport sys\nsys.stdin.read()"
    with subprocess.Popen([python, "-c", waiting], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        found = read_kinds(process.pid)
        process.stdin.close()
    return found


def read_kinds(process: int) -> dict[str, float]:
    """Return PSS, RSS and what of them is no page of a file, MB."""
    memory = read_memory(process)
    return {kind.lower(): round(memory[kind] / 1e6, 1) for kind in KINDS}


def read_mappings(process: int) -> dict[str, float]:
    """Return the RSS of the files and areas that take most, MB."""
    found: dict[str, int] = {}
    name = ""
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            name = Path(words[5]).name if len(words) > 5 else "anonymous"
        elif words[0] == "Rss:":
            found[name] = found.get(name, 0) + int(words[1])
    largest = sorted(found.items(), key=lambda item: -item[1])[:10]
    return {name: round(kibibytes * 1024 / 1e6, 1) for name, kibibytes in largest}


if __name__ == "__main__":
    main()
