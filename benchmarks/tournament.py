"""Is the engine that a tournament keeps the fastest when all are measured again?

    PYTHONPATH=device_runtime:toolkit .venv/bin/python benchmarks/tournament.py [--only NAME ...] [--again 5]

The models are those of `public_models.py` that convert to TFLite. Engines are onnxruntime and LiteRT with one
and two threads, and LiteRT without XNNPACK. Each model has one tournament, and `--again` further measurements
of the same kind in processes of their own. "fastest" counts those in which the kept engine has the lowest
median, "as fast" those in which it cannot be told from that one
(`edgekit_runtime.sessions.tournament.judge`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.latency import Latency
from edgekit_runtime.sessions import Session
from edgekit_runtime.sessions.litert import LiteRtOptions, LiteRtSession
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.sessions.tournament import judge, race
from edgekit_toolkit.feeds import bind_dims
from edgekit_toolkit.importers.onnx import load_onnx
from edgekit_toolkit.passes.pipeline import optimise
from edgekit_toolkit.tflite.convert import convert
from public_models import MODELS, MissingError, PublicModel
from public_samples import samples_of, with_random_weights


def prepare(public: PublicModel, folder: Path) -> Path:
    """Write a model as both engines take it, and one sample for it; returns the path of the ONNX file."""
    source = load_onnx(public.path()).model
    if not public.weights:
        source = with_random_weights(source)
    dims = bind_dims(source, public.dims, public.ranges)
    *_, feeds = samples_of(public, source, dims)
    optimised = optimise(source, batch=None, feeds=feeds[:1]).model
    path = folder / f"{public.name}.onnx"
    path.with_suffix(".tflite").write_bytes(convert(optimised, dims))
    path.write_bytes(optimised.SerializeToString())
    np.savez(path.with_suffix(".npz"), **feeds[0])
    return path


def measure(model: Path, seed: int) -> dict[str, Latency]:
    """Return the latencies of one interleaved measurement of all engines."""
    tflite = model.with_suffix(".tflite")
    sessions: dict[str, Session] = {
        "ort, 1 thread": OrtSession(model, OrtOptions(threads=1)),
        "ort, 2 threads": OrtSession(model, OrtOptions(threads=2)),
        "litert, 1 thread": LiteRtSession(tflite, LiteRtOptions(threads=1)),
        "litert, 2 threads": LiteRtSession(tflite, LiteRtOptions(threads=2)),
        "litert, plain": LiteRtSession(tflite, LiteRtOptions(threads=1, xnnpack=False)),
    }
    with np.load(model.with_suffix(".npz")) as sample:
        return race(sessions, dict(sample), seed=seed)


def contest(model: Path, again: int) -> tuple[int, int]:
    """Hold one tournament, measure again, print the row; returns how often the kept one was (as) fast."""
    measured = []
    for seed in range(again + 1):
        command = [sys.executable, __file__, "--measure", str(model), "--seed", str(seed)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        measured.append({name: Latency(tuple(s)) for name, s in json.loads(output).items()})
    kept = judge(measured[0]).winner
    fastest = sum(kept == min(m, key=lambda name: m[name].median_s) for m in measured[1:])
    as_fast = sum(kept in judge(m).tied for m in measured[1:])
    worst = max(m[kept].median_s / min(latency.median_s for latency in m.values()) for m in measured[1:])
    medians = ", ".join(f"{name} {latency.median_s * 1e3:.3f}" for name, latency in measured[0].items())
    print(
        f"{model.stem}: {medians} ms; kept {kept}: fastest {fastest}, as fast {as_fast},"
        f" at most {worst - 1:.1%} behind",
        flush=True,
    )
    return fastest, as_fast


def main() -> None:
    """Print one row a model, and the share of all further measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[model.name for model in MODELS])
    parser.add_argument("--again", type=int, default=5)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        found = measure(arguments.measure, arguments.seed)
        print(json.dumps({name: latency.seconds for name, latency in found.items()}))
        return
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        for public in MODELS:
            if arguments.only and public.name not in arguments.only:
                continue
            try:
                counts.append(contest(prepare(public, Path(folder)), arguments.again))
            except (MissingError, EdgekitError) as error:
                print(f"{public.name}: skipped, {error}", file=sys.stderr)
    total = arguments.again * len(counts)
    fastest, as_fast = (sum(column) for column in zip(*counts, strict=True))
    print(f"all: {len(counts)} models, fastest in {fastest} of {total}, as fast in {as_fast} of {total}")


if __name__ == "__main__":
    main()
