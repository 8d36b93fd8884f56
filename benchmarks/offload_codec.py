"""What the codings of a cut cost: accuracy, bytes after zstd-1, time to code and decode.

    PYTHONPATH=device_runtime:offload .venv/bin/python benchmarks/offload_codec.py [--json FILE]

At three cuts of each model of models/tiny with its evaluation set. Takes under two minutes on two cores.
Accuracy is top-1 in points against the whole model. Times are of one row, the head and the tail with coding
less those without.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from edgekit_offload.partition.coding import RAW, Coding
from edgekit_offload.partition.source_model import SourceModel
from edgekit_offload.partition.split import Part, split_model
from edgekit_runtime.codecs.compression import compress
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession

MODELS = Path(__file__).parents[1] / "models" / "tiny"
CODINGS = {
    "int8": Coding("int8"),
    "int8 per channel": Coding("int8", per_channel=True),
    "int4": Coding("int4"),
    "int4 per channel": Coding("int4", per_channel=True),
}
OPTIONS = OrtOptions(threads=1, weights="model.onnx")


def measure(name: str) -> list[dict[str, Any]]:
    """Return one row for each cut and coding of a model."""
    content = (MODELS / f"{name}.onnx").read_bytes()
    whole = SourceModel(content)
    data = np.load(MODELS / f"{name}.eval.npz")
    feeds, labels = {whole.inputs[0]: data[whole.inputs[0]]}, data["y"]
    count = len(whole.proto.graph.node)
    rows = []
    for cut in sorted({max(1, count * share // 4) for share in (1, 2, 3)}):
        plain = run(whole, range(cut), RAW, feeds)
        for title, coding in CODINGS.items():
            coded = run(whole, range(cut), coding, feeds)
            hits = [float((one["outputs"].argmax(1) == labels).mean() * 100) for one in (coded, plain)]
            rows.append(
                {
                    "model": name, "cut": cut, "coding": title, "samples": len(labels),
                    "accuracy_change_points": hits[0] - hits[1],
                    "raw_bytes": plain["bytes"], "raw_zstd_bytes": plain["zstd_bytes"],
                    "bytes": coded["bytes"], "zstd_bytes": coded["zstd_bytes"],
                    "encode_ms": coded["head_ms"] - plain["head_ms"],
                    "decode_ms": coded["tail_ms"] - plain["tail_ms"],
                }
            )  # fmt: skip
    return rows


def run(whole: SourceModel, nodes: range, coding: Coding, feeds: dict[str, Any]) -> dict[str, Any]:
    """Run a split on all samples at once, and on one alone for bytes and times."""
    split = split_model(whole, nodes, coding)
    assert split.head is not None
    head, tail = (open_part(part, whole.content) for part in (split.head, split.tail))
    one = {name: value[:1] for name, value in feeds.items()}
    sent = head.run(one)
    body = b"".join(sent[spec.name].tobytes() for spec in split.sent)
    made = head.run(feeds)
    outputs = tail.run({spec.name: made[spec.name] for spec in split.sent})
    tail_feeds = {spec.name: sent[spec.name] for spec in split.sent}
    return {
        "outputs": next(iter(outputs.values())),
        "bytes": len(body),
        "zstd_bytes": len(compress(body)),
        "head_ms": median_ms(head, one),
        "tail_ms": median_ms(tail, tail_feeds),
    }


def open_part(part: Part, weights: bytes) -> OrtSession:
    """Return a session of a head or tail."""
    return OrtSession(part.content, OPTIONS, weights)


def median_ms(session: OrtSession, feeds: dict[str, Any]) -> float:
    """Return the median time of 50 runs."""
    times = []
    for _ in range(50):
        start_s = time.perf_counter()
        session.run(feeds)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times) * 1000


def main() -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    rows = [row for path in sorted(MODELS.glob("*.onnx")) for row in measure(path.stem)]
    for row in rows:
        print(
            f"{row['model']:20} {row['cut']:3} {row['coding']:17} {row['accuracy_change_points']:+6.2f}"
            f" points {row['raw_bytes']:7} -> {row['zstd_bytes']:6} bytes"
            f" {row['encode_ms']:+.3f} {row['decode_ms']:+.3f} ms"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
