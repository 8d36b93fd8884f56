"""Does a model that was saved optimised load faster and in less memory?

    scripts/python benchmarks/ort_loading.py [MODEL.onnx ...]

Each figure is of a fresh process with one thread: the time in the constructor of `OrtSession`, the median of
five runs, and the peak and the final memory of the process less what it had before loading. The rounds are
interleaved in random order; printed are medians. Without
arguments: a generated model of 100 MB and the models of models/tiny.
"""

import telemetry_off  # noqa: F401

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 9
CHILD = """
import json, sys, time
from pathlib import Path
import numpy as np, onnxruntime
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession

def status(key):
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(key)).split()[1]) * 1024

bare = status("VmRSS:")
begin = time.perf_counter()
session = OrtSession(Path(sys.argv[1]), OrtOptions(threads=1, **json.loads(sys.argv[2])))
load_s = time.perf_counter() - begin
feeds = {
    spec.name: np.ones([size if isinstance(size, int) else 1 for size in spec.shape], spec.dtype)
    for spec in session.inputs
}
session.run(feeds)
runs = []
for _ in range(5):
    begin = time.perf_counter()
    session.run(feeds)
    runs.append(time.perf_counter() - begin)
print(json.dumps({
    "load_s": load_s, "run_s": sorted(runs)[2],
    "peak": status("VmHWM:") - bare, "rss": status("VmRSS:") - bare,
}))
"""


def make_large(path: Path) -> None:
    """Write 24 matrix products of 1024 x 1024 with bias and ReLU: 100 MB of weights."""
    from graphs import GraphBuilder

    rng, build, x = np.random.default_rng(0), GraphBuilder(), "x"
    for _ in range(24):
        weight = rng.normal(0, 0.03, (1024, 1024)).astype(np.float32)
        x = build.add("MatMul", [x, build.weight(weight)])
        x = build.add("Add", [x, build.weight(np.zeros(1024, np.float32))])
        x = build.add("Relu", [x])
    path.write_bytes(build.model({"x": [1, 1024]}, {x: None}).SerializeToString())


def save_optimised(source: Path, path: Path, level: str) -> None:
    """Write what onnxruntime makes of a model at an optimisation level."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def measure(path: Path, options: str) -> dict[str, float]:
    command = [sys.executable, "-c", CHILD, str(path), options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def compare(source: Path, folder: Path) -> None:
    ways: dict[str, tuple[Path, str]] = {
        "as it is": (source, "{}"),
        "without arena": (source, '{"arena": false}'),
    }
    for level in ("ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"):
        path = folder / f"{source.stem}-{level}.onnx"
        save_optimised(source, path, level)
        ways[f"saved by {level.removeprefix('ORT_ENABLE_').lower()}"] = (path, '{"optimise": false}')
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    order = list(ways)
    for _ in range(ROUNDS):
        random.shuffle(order)
        for way in order:
            found[way].append(measure(*ways[way]))
    print(f"{source.name} ({source.stat().st_size / 1e6:.1f} MB)")
    for way, samples in found.items():
        median: dict[str, Any] = {key: statistics.median(s[key] for s in samples) for key in samples[0]}
        print(
            f"  {way:18} load {median['load_s'] * 1e3:7.1f} ms, run {median['run_s'] * 1e3:7.3f} ms,"
            f" peak +{median['peak'] / 1e6:6.1f} MB, stays +{median['rss'] / 1e6:6.1f} MB"
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [Path(argument) for argument in sys.argv[1:]]
        if not models:
            make_large(folder / "large.onnx")
            models = [folder / "large.onnx", *sorted((ROOT / "models" / "tiny").glob("*.onnx"))]
        for model in models:
            compare(model, folder)


if __name__ == "__main__":
    main()
