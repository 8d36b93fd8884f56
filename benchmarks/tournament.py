"""Is the engine that a tournament keeps the fastest when all are measured again?

    PYTHONPATH=device_runtime .venv/bin/python benchmarks/tournament.py MODEL.onnx ... [--again 5]

Needs a `.tflite` of the same model beside each `.onnx`. Engines are onnxruntime and LiteRT with one and two
threads, and LiteRT without XNNPACK. Each model has one tournament, and `--again` further measurements of the
same kind in processes of their own. "fastest" counts those in which the kept engine has the lowest median,
"as fast" those in which it cannot be told from that one (`edgekit_runtime.sessions.tournament.judge`).
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgekit_runtime.latency import Latency
from edgekit_runtime.sessions import Session
from edgekit_runtime.sessions.litert import LiteRtOptions, LiteRtSession
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.sessions.tournament import judge, race
from edgekit_runtime.tensors import TensorSpec


class Renamed:
    """A session whose inputs go by their place, since the two files name them differently."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.inputs: tuple[TensorSpec, ...] = session.inputs
        self.outputs: tuple[TensorSpec, ...] = session.outputs

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        named = {spec.name: inputs[str(index)] for index, spec in enumerate(self.inputs)}
        return self.session.run(named)

    def close(self) -> None:
        self.session.close()


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
    rng = np.random.default_rng(0)
    feeds = {}
    for index, spec in enumerate(sessions["ort, 1 thread"].inputs):
        shape = [size if isinstance(size, int) else 1 for size in spec.shape]
        feeds[str(index)] = rng.uniform(0, 1, shape).astype(spec.dtype)
    return race({name: Renamed(session) for name, session in sessions.items()}, feeds, seed=seed)


def main() -> None:
    """Print one row a model, and the share of all further measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--again", type=int, default=5)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        found = measure(arguments.models[0], arguments.seed)
        print(json.dumps({name: latency.seconds for name, latency in found.items()}))
        return
    fastest = as_fast = 0
    for model in arguments.models:
        measured = []
        for seed in range(arguments.again + 1):
            command = [sys.executable, __file__, str(model), "--seed", str(seed)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            measured.append({name: Latency(tuple(s)) for name, s in json.loads(output).items()})
        kept = judge(measured[0]).winner
        own_fastest = sum(kept == min(m, key=lambda name: m[name].median_s) for m in measured[1:])
        own_as_fast = sum(kept in judge(m).tied for m in measured[1:])
        fastest, as_fast = fastest + own_fastest, as_fast + own_as_fast
        medians = ", ".join(f"{name} {latency.median_s * 1e3:.3f}" for name, latency in measured[0].items())
        print(f"{model.stem}: {medians} ms; kept {kept}: fastest {own_fastest}, as fast {own_as_fast}")
    total = arguments.again * len(arguments.models)
    print(f"all: fastest in {fastest} of {total}, as fast in {as_fast} of {total}")


if __name__ == "__main__":
    main()
