"""Flips random bytes of a real package and counts how many of the damaged ones the reader refuses.

    python benchmarks/byte_flips.py [MODEL] [--flips 1000] [--seed 0]

The package is made by the command line from a model of models/tiny. Each flip replaces one byte at a random
place with another random value, in a fresh copy. Detected means that `read_package` raises a PackageError (or
one of its kinds); any other exception is a crash, not a detection. Exits with 1 unless all are detected.
"""

import collections
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from edgekit_runtime.errors import PackageError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from results import make_parser

TINY = Path(__file__).resolve().parent.parent / "models" / "tiny"


def make_package(model: str, folder: Path) -> Path:
    """A package of one of models/tiny, signed with a key of this run only."""
    data = [str(TINY / f"{model}.{part}.npz") for part in ("calib", "eval")]
    command = [sys.executable, "-m", "edgekit_cli", "package", str(TINY / f"{model}.onnx")]
    command += ["--target", "x86-64", "--calibration", data[0], "--eval", data[1], "-o", str(folder)]
    os.environ["EDGEKIT_HOME"] = str(folder)
    subprocess.run(command, check=True, stdout=sys.stderr)
    return next(folder.glob("*.edgepkg"))


def read_damaged(damaged: bytes, path: Path, trust: TrustStore) -> str:
    """What the reader says of these bytes: the name of an error, or `not detected`."""
    path.write_bytes(damaged)
    try:
        read_package(path, trust).close()
    except PackageError as error:
        return type(error).__name__
    except Exception as error:  # whatever the reader let through: a finding
        return f"crash: {error!r}"
    return "not detected"


def flip_bytes(path: Path, flips: int, seed: int) -> dict[str, object]:
    """Damage and read `flips` copies; the counts, and where a flip went unnoticed."""
    content = path.read_bytes()
    trust = TrustStore.from_folder(find_keys_folder())
    read_package(path, trust).close()  # undamaged it must be accepted
    rng = np.random.default_rng(seed)
    answers: collections.Counter[str] = collections.Counter()
    unnoticed = []
    start = time.perf_counter()
    for _ in range(flips):
        offset, flip = int(rng.integers(len(content))), int(rng.integers(1, 256))
        damaged = bytearray(content)
        damaged[offset] ^= flip
        answer = read_damaged(bytes(damaged), path.with_suffix(".damaged"), trust)
        answers[answer] += 1
        if answer == "not detected" or answer.startswith("crash"):
            unnoticed.append([offset, flip])
    return {
        "package_bytes": len(content),
        "flips": flips,
        "detected": flips - len(unnoticed),
        "answers": dict(answers),
        "unnoticed": unnoticed,
        "ms_each": 1e3 * (time.perf_counter() - start) / flips,
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("model", nargs="?", default="digits_cnn")
    parser.add_argument("--flips", type=int, default=1000, help="damaged copies")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = flip_bytes(make_package(options.model, Path(folder)), options.flips, options.seed)
    print("\n".join(f"{name}: {value}" for name, value in found.items()))
    return int(found["detected"] != options.flips)


if __name__ == "__main__":
    sys.exit(main())
