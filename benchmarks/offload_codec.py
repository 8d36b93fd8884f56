"""What the codings of a cut cost: accuracy, bytes after zstd-1, time to code and decode.

    scripts/python benchmarks/offload_codec.py [--json FILE]

At three to five cuts of each model of models/tiny and ../shared/models with labelled samples, and of the int8
forms that `edgekit package` makes of two of them; without ../shared/models the first alone. Under five
minutes on two cores. `--only NAME` measures one model.

Cuts lie where the planner makes them: at outputs of fused kernels. It never cuts between a convolution and
its activation, whose input has outliers that the activation clips. A cut sends one tensor where the model has
such places.

The accuracy is top-1 in points against the same model uncut; photographs without labels are held against the
float model's own answer, so any other answer counts as wrong. One sample is 100/n points, and no smaller
change can be seen. So the table also has what the answers that differ are expected to cost by the model's own
probabilities (`compare_answers`), and the largest change of a score as a share of the range of all scores.
Times are of one row: head and tail with coding less those without.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

import works
from edgekit_offload.partition.coding import RAW, Coding
from edgekit_offload.partition.source_model import SourceModel
from edgekit_offload.partition.split import Part, SplitModels, split_model
from edgekit_offload.planning.coding_costs import compare_answers
from edgekit_offload.profiling.machine import Machine, RunnableGraph, profile_kernels
from edgekit_offload.profiling.planning_graph import join_profiles
from edgekit_runtime.codecs.compression import compress
from edgekit_runtime.errors import CutError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.trust.trust_store import TrustStore
from results import make_parser, write_json
from turns import median_ms
from works import list_subjects

CODINGS = {"int8": Coding("int8"), "int4": Coding("int4")}
OPTIONS = OrtOptions(threads=2, weights="model.onnx")
LAYERS = frozenset({"Conv", "Gemm", "MatMul"})
PACKAGED = {"resnet8": "140kB", "vww": "450kB"}  # work -> a size that only int8 forms keep
GOAL_POINTS = 0.1
CUTS, FEW_CUTS = 5, 3
LARGE_BYTES = 10_000_000  # models above get few cuts
BATCH, TIMED_RUNS = 50, 20


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with samples of its only input, float32 [n, ...], and labels, int [n], if there are any."""

    name: str
    content: bytes
    samples: NDArray[np.float32]
    labels: NDArray[Any] | None


@dataclass(frozen=True, slots=True)
class Row:
    """One cut in one coding.

    Attributes:
        change_points: top-1 with the cut less that without.
        expected_points: the same, estimated by the model's own probabilities.
        changed: samples with another answer than without the cut.
        largest_change: of a score, as a share of the range of all scores.
        raw_bytes, bytes, zstd_bytes: of one sample: without coding, coded, and compressed.
        encode_ms, decode_ms: of one row.
    """

    model: str
    sent: str
    coding: str
    samples: int
    change_points: float
    expected_points: float
    changed: int
    largest_change: float
    raw_bytes: int
    bytes: int
    zstd_bytes: int
    encode_ms: float
    decode_ms: float


def find_subjects(only: str, folder: Path) -> Iterator[Subject]:
    """Yield models that are there, and int8 forms of some; `folder` is for packages."""
    for model in list_subjects([only.removesuffix(" packaged")] if only else None):
        if model.name != "ppocr_det" and only in ("", model.name):
            yield _load(model)
        if model.name in PACKAGED and only in ("", f"{model.name} packaged"):
            yield _packaged(model, folder)


def _load(model: works.Subject) -> Subject:
    parts = [dict(np.load(path)) for path in (model.calibration, model.evaluation)]
    # Nothing is calibrated here, so all samples can judge, where both parts have labels or none has; CIFAR-10
    # alone has further ones for calibration.
    if parts[0].keys() != parts[1].keys() or model.name == "resnet8":
        del parts[0]
    joined = {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}
    labels = joined.pop("y", None)
    (samples,) = joined.values()
    return Subject(model.name, model.model.read_bytes(), samples, labels)


def _packaged(subject: works.Subject, folder: Path) -> Subject:
    """The int8 form that `edgekit package` chooses; it is not in the float model's package."""
    command = [sys.executable, "-m", "edgekit_cli", "package", str(subject.model), "--target", "x86-64"]
    command += ["--backend", "ort", "--budget", f"size={PACKAGED[subject.name]},drop=5%"]
    command += ["--search-seconds", "0", *subject.options, "--out", str(folder)]
    subprocess.run(command, env={**os.environ, "EDGEKIT_HOME": str(folder)}, capture_output=True, check=True)
    path = next(folder.glob(f"{subject.model.stem}*.edgepkg"))
    with read_package(path, TrustStore.from_folder(folder / "keys")) as package:
        content = bytes(package.read(package.manifest.backend.artifact))
    assert any(node.op_type == "DequantizeLinear" for node in onnx.load_from_string(content).graph.node)
    return dataclasses.replace(_load(subject), name=f"{subject.name} packaged", content=content)


def measure(subject: Subject) -> Iterator[Row]:
    whole = SourceModel(subject.content)
    session = OrtSession(subject.content, dataclasses.replace(OPTIONS, weights=None))
    step = BATCH if isinstance(session.inputs[0].shape[0], str) else 1
    batches = [subject.samples[start : start + step] for start in range(0, len(subject.samples), step)]
    name = session.inputs[0].name
    uncut = np.concatenate([_scores(session.run({name: batch})) for batch in batches])
    answers = uncut.argmax(1)
    labels = answers if subject.labels is None else subject.labels
    for raw in find_cuts(whole, FEW_CUTS if len(subject.content) > LARGE_BYTES else CUTS):
        plain = Halves(raw[1], subject.content)
        plain_ms, raw_bytes = plain.time(batches[0][:1]), len(plain.body(batches[0][:1]))
        for title, coding in CODINGS.items():
            halves = Halves(split_model(whole, raw[0], coding), subject.content)
            scores = np.concatenate([_scores(halves.run(batch)) for batch in batches])
            change = compare_answers({"scores": scores}, {"scores": uncut}, {"scores"})
            assert change is not None
            coded_ms, body = halves.time(batches[0][:1]), halves.body(batches[0][:1])
            yield Row(
                subject.name, "+".join(raw[1].coded), title, len(scores),
                float((scores.argmax(1) == labels).mean() - (answers == labels).mean()) * 100,
                -change.loss * 100,
                int((scores.argmax(1) != answers).sum()),
                float(np.abs(scores - uncut).max() / np.ptp(uncut)),
                raw_bytes, len(body), len(compress(body)),
                coded_ms[0] - plain_ms[0], coded_ms[1] - plain_ms[1],
            )  # fmt: skip


def find_cuts(whole: SourceModel, count: int) -> list[tuple[frozenset[int], SplitModels]]:
    """Return cuts of the planner that are spread over the model: those that send the fewest tensors.

    They lie behind the first layer: before it a cut sends the input, which uploads code in another way.
    """
    graph = RunnableGraph(whole.content)
    planning = join_profiles(whole.content, [profile_kernels(Machine.parse("local"), graph, seconds=0.1)])
    splits: dict[tuple[str, ...], tuple[frozenset[int], SplitModels]] = {}
    nodes: frozenset[int] = frozenset()
    for kernel in planning.nodes:
        nodes |= set(kernel)
        if not any(whole.proto.graph.node[index].op_type in LAYERS for index in nodes):
            continue
        try:
            split = split_model(whole, nodes, RAW)
        except CutError:  # only nodes that compute nothing are left
            continue
        if split.head is not None and not set(split.coded) & set(whole.inputs):
            splits.setdefault(split.coded, (nodes, split))
    fewest = min(map(len, splits))
    found = [one for coded, one in splits.items() if len(coded) == fewest]
    return [found[place] for place in sorted({round(one) for one in np.linspace(0, len(found) - 1, count)})]


class Halves:
    def __init__(self, split: SplitModels, weights: bytes) -> None:
        assert split.head is not None
        self._sent = [spec.name for spec in split.sent]
        self._head, self._tail = (_open(part, weights) for part in (split.head, split.tail))
        self._input = split.head.inputs[0].name

    def run(self, samples: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        made = self._head.run({self._input: samples})
        return self._tail.run({name: made[name] for name in self._sent})

    def body(self, sample: NDArray[np.float32]) -> bytes:
        made = self._head.run({self._input: sample})
        return b"".join(made[name].tobytes() for name in self._sent)

    def time(self, sample: NDArray[np.float32]) -> tuple[float, float]:
        """Return the median times of head and tail in ms."""
        feeds = {self._input: sample}
        made = self._head.run(feeds)
        sent = {name: made[name] for name in self._sent}
        return (
            median_ms(lambda: self._head.run(feeds), TIMED_RUNS),
            median_ms(lambda: self._tail.run(sent), TIMED_RUNS),
        )


def _open(part: Part, weights: bytes) -> OrtSession:
    return OrtSession(part.content, OPTIONS if part.reads_weights else OrtOptions(threads=2), weights)


def _scores(outputs: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    (scores,) = outputs.values()
    return scores.reshape(len(scores), -1)


def print_row(row: Row) -> None:
    print(
        f"{row.model:23} {row.sent[-28:]:28} {row.coding:6}"
        f" {row.change_points:+6.2f} of {100 / row.samples:4.2f} {row.expected_points:+7.3f}"
        f" {row.changed:4} {row.largest_change:8.2%} {row.raw_bytes:7} -> {row.zstd_bytes:6}"
        f" {row.encode_ms:+7.3f} {row.decode_ms:+7.3f}",
        flush=True,
    )


def print_summary(coding: str, rows: list[Row]) -> None:
    """Print how many cuts keep the goal, by what each set of samples can show."""
    worst = min(rows, key=lambda row: row.expected_points)
    kept = sum(-row.expected_points <= GOAL_POINTS for row in rows)
    print(
        f"{coding}: {kept} of {len(rows)} cuts are expected to lose at most {GOAL_POINTS} points; the worst"
        f" is {worst.model}, {worst.expected_points:+.3f} at {worst.sent}"
    )
    fine = [row for row in rows if 100 / row.samples <= GOAL_POINTS]
    kept = sum(abs(row.change_points) <= GOAL_POINTS + 1e-9 for row in fine)
    print(f"  where one answer is at most {GOAL_POINTS} points: {kept} of {len(fine)} cuts stay within it")
    coarse = [row for row in rows if row not in fine]
    kept = sum(row.changed == 0 for row in coarse)
    print(f"  where one answer is more: {kept} of {len(coarse)} cuts change no answer")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="measure this model")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    print(
        f"{'model':23} {'sent tensor':28} {'coding':6} {'points of 1':>14} expected other"
        f" {'largest':>8} {'bytes -> with zstd':>17} {'encode':>7} {'decode':>7} ms"
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for subject in find_subjects(arguments.only, Path(folder)):
            for row in measure(subject):
                print_row(row)
                rows.append(row)
    for coding in CODINGS:
        print_summary(coding, [row for row in rows if row.coding == coding])
    write_json(arguments.json, [dataclasses.asdict(row) for row in rows])


if __name__ == "__main__":
    main()
