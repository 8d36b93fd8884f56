"""Weights of 8 bits and fewer by other tools, beside ours: score, bytes of the model, bytes after xz.

    python benchmarks/compression_peers.py [--only NAME ...] [--peers TOOL ...] [--methods METHOD ...]
                                          [--bits 8 4] [--json FILE]

All get the same float model and calibration samples, and activations have 8 bits everywhere. A tool without
its environment gets it on first use, as in `quantization.py`; onnxruntime and ai-edge-quantizer are in ours.
Models for LiteRT come from our conversion. Our rows are those of `compression.py`: nothing is chosen.
"""

import telemetry_off  # noqa: F401

import lzma
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import onnx
import onnxruntime

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.sessions import Session
from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession
from edgekit_toolkit.passes.optimiser import optimise
from edgekit_toolkit.tflite.convert import convert
from environments import make_environment
from judging import THREADS, Judge, open_model, read_arrays
from litert_quantization import Renamed
from pruned_latency import free_dims, read_feeds
from quantization import OLIVE, Command, run_tool
from results import NONE, machine, make_parser, print_head, print_row, write_json
from works import HERE, Subject, list_subjects

MODELS = ("resnet8", "dscnn", "mnist5k_dscnn", "mobilenet_v1_025")
AIMET = ("aimet-onnx==2.42.0", "torch==2.13.0", f"onnxruntime=={onnxruntime.__version__}")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A method of a tool.

    Attributes:
        tool: name in the table, and for --peers.
        method: as the tool calls it.
        script: in `peers`; it takes model, calibration samples, output, `options` and `--bits`.
        options: that choose the method.
        packages: of the tool's own environment; empty if it is in ours.
        suffix: of the models that it reads and writes.
    """

    tool: str
    method: str
    script: str
    options: tuple[str, ...]
    packages: tuple[str, ...] = ()
    suffix: str = ".onnx"


PEERS = (
    *(
        Peer(
            tool="onnxruntime",
            method=f"nearest, {ranges} ranges",
            script="ort_static.py",
            options=("--per-channel", ranges),
        )
        for ranges in ("MinMax", "Percentile")
    ),
    Peer(
        tool="olive",
        method="OnnxStaticQuantization",
        script="olive_static.py",
        options=("--per-channel",),
        packages=OLIVE,
    ),
    *(
        Peer(
            tool="ai-edge-quantizer",
            method=algorithm,
            script="ai_edge_static.py",
            options=("--algorithm", algorithm),
            suffix=".tflite",
        )
        for algorithm in ("min_max_uniform_quantize", "OCTAV", "MSE")
    ),
    *(
        Peer(
            tool="aimet-onnx",
            method=method,
            script="aimet_static.py",
            options=("--method", method),
            packages=AIMET,
        )
        for method in ("nearest", "seq_mse", "adaround")
    ),
)


@dataclass(kw_only=True)
class CompressedRow:
    """One model by one method; the figures are None if there is none, and `note` says why."""

    HEADS: ClassVar = ("model", "tool", "bits", "method", "score", "model bytes", "xz -9", "seconds")

    model: str = ""
    tool: str
    bits: int
    method: str
    seconds: float
    note: str = ""
    score: float | None = None
    model_bytes: int | None = None
    packed_bytes: int | None = None

    def cells(self) -> list[object]:
        """Return the cells of its row below `HEADS`."""
        score = self.note or NONE if self.score is None else f"{100 * self.score:.2f} %"
        sizes = [NONE if size is None else f"{size:,}" for size in (self.model_bytes, self.packed_bytes)]
        return [self.model, self.tool, self.bits, self.method, score, *sizes, f"{self.seconds:.1f}"]


def open_judge(subject: Subject) -> Judge:
    metric = "top1" if subject.work is None else subject.work.metric
    return Judge(read_arrays(subject.evaluation), metric, open_model(subject.model))


def convert_for_litert(subject: Subject, target: Path) -> Path:
    source = onnx.load(subject.model)
    feeds = read_feeds(subject.calibration)[:1]
    target.write_bytes(convert(optimise(source, batch=None, feeds=feeds).model, free_dims(source)))
    return target


def open_result(path: Path, input_name: str) -> Session | Renamed:
    if path.suffix == ".onnx":
        return open_model(path)
    return Renamed(LiteRtSession(path, LiteRtOptions(threads=THREADS)), input_name)


def run_peer(peer: Peer, bits: int, command: Command, target: Path) -> CompressedRow:
    """Return the row of what `command` writes to `target`, still without a score."""
    target.unlink(missing_ok=True)
    made, _ = run_tool(peer.tool, [*command, target, *peer.options, "--bits", str(bits)])
    row = CompressedRow(
        tool=peer.tool, method=peer.method, bits=bits, seconds=made.figures["seconds"], note=made.note
    )
    if not made.note:
        content = target.read_bytes()
        row.model_bytes, row.packed_bytes = len(content), len(lzma.compress(content, preset=9))
    return row


def run_peers(subject: Subject, peers: list[Peer], all_bits: list[int]) -> Iterator[CompressedRow]:
    judge = open_judge(subject)
    input_name = next(iter(next(judge.feeds())))
    with tempfile.TemporaryDirectory() as folder:
        sources = {".onnx": subject.model}
        for peer in peers:
            python: str | Path | None = sys.executable
            if peer.packages:
                python = make_environment(peer.tool, peer.packages, "2 to 6 GB")
            if python is None:
                continue
            if peer.suffix not in sources:
                sources[peer.suffix] = convert_for_litert(subject, Path(folder, f"source{peer.suffix}"))
            command: Command = [python, HERE / "peers" / peer.script, sources[peer.suffix]]
            command.append(subject.calibration)
            target = Path(folder, f"result{peer.suffix}")
            for bits in all_bits:
                row = run_peer(peer, bits, command, target)
                row.model = subject.name
                if row.model_bytes:
                    try:
                        row.score = judge.score(open_result(target, input_name))
                    except EdgekitError as error:
                        row.note = f"does not run: {error}"[:300]
                yield row


def main() -> None:
    parser = make_parser(__doc__)
    tools, methods = (
        list(dict.fromkeys(names))
        for names in zip(*((peer.tool, peer.method) for peer in PEERS), strict=True)
    )
    parser.add_argument("--only", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--peers", nargs="+", choices=tools, default=tools)
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    peers = [peer for peer in PEERS if peer.tool in options.peers and peer.method in options.methods]
    host, rows = machine(), []
    print(host)
    print_head(*CompressedRow.HEADS)
    for subject in list_subjects(options.only):
        for row in run_peers(subject, peers, options.bits):
            print_row(*row.cells())
            rows.append(asdict(row))
            write_json(options.json, {"machine": host, "rows": rows})


if __name__ == "__main__":
    main()
