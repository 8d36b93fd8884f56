"""Compares our forms of float `.tflite` models with the vendors' own int8 files: score, size, latency.

    python benchmarks/litert_quantization.py [--only NAME] [--search-s 30]

The search sees the calibration samples alone. Like `edgekit package`, the table's choice then sees scores: it
is the fastest form that drops at most as much as the vendor's file and 0.3 points, and of equally fast ones
the smallest. All sessions of a model take turns in one run, once with one thread and once with two; a
vendor's file is fed with floats as ours are, so its latency holds the conversion of the input.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from edgekit_runtime.sessions.latency import LatencyLimits, measure_latency
from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession
from edgekit_toolkit.importers.tflite.importer import load_tflite
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.tflite import TfliteModel
from edgekit_toolkit.pipeline.candidates import Candidate, find_candidates
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer
from edgekit_toolkit.quantize.scheme import LITERT, LITERT_AVX512
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.selection.choice import SAME_LATENCY
from judging import Judge, read_arrays
from public_models import SHARED
from results import machine, make_parser
from works import Subject, Work, list_subjects

FILES = {
    "resnet8": ("resnet8_cifar10_fp32.tflite", "resnet8_cifar10_int8.tflite"),
    "vww": ("mobilenetv1_025_vww_fp32.tflite", "mobilenetv1_025_vww_int8.tflite"),
    "mobilenet_v1_025": ("mobilenet_v1_025_224_fp32.tflite", "mobilenet_v1_025_224_uint8_qat.tflite"),
}
# That of the target x86-64, which has AVX-512.
SCHEME = LITERT_AVX512 if "avx512f" in Path("/proc/cpuinfo").read_text() else LITERT
MORE_DROP_POINTS = 0.3
LATENCY_GOAL = 0.6
LIMITS = LatencyLimits(min_rounds=60, max_rounds=600, time_limit_s=40, precision=0.01)


@dataclass
class Row:
    """One file.

    Attributes:
        label: what it is.
        model_bytes: of the file.
        snr_db: on calibration samples; None for files that are not ours.
        score: 0..1.
        drop_points: below the float file.
        ratios: latency to that of the float file, with one thread and with two.
        milliseconds: latency, likewise.
    """

    label: str
    model_bytes: int
    snr_db: float | None
    score: float
    drop_points: float
    ratios: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)


def samples(path: Path, name: str) -> Iterator[Feeds]:
    """The calibration samples of a work, one at a time, for the input `name`."""
    with np.load(path) as data:
        array = data[next(key for key in data if key != "y")]
    for index in range(len(array)):
        yield {name: array[index : index + 1]}


class Renamed:
    def __init__(self, session: LiteRtSession, name: str) -> None:
        self._session, self._name = session, name
        self._inner = session.inputs[0].name

    def run(self, feeds: Feeds) -> Feeds:
        outputs = self._session.run({self._inner: feeds[self._name]})
        return {"scores": next(iter(outputs.values()))}


def benchmark(subject: Subject, search_s: float) -> tuple[list[Row], float]:
    """The rows of a work, the float file first and the vendor's second; and the seconds of the search."""
    ours, vendor = (SHARED / name for name in FILES[subject.name])
    source = load_tflite(ours)
    name = source.inputs[0].name
    start = time.perf_counter()
    found = find_candidates(
        LiteRtQuantizer(source.model.content, threads=2, scheme=SCHEME),
        lambda: samples(subject.calibration, name),
        per_channel=True,
        kinds=frozenset(forms.KINDS),
        limit_s=search_s,
        dims={},
        progress=lambda *_: None,
    )
    seconds = time.perf_counter() - start
    rival = Candidate(
        "the vendor's int8", found.candidates[0].form, TfliteModel(vendor.read_bytes()), float("nan")
    )
    files = [found.candidates[0], rival, *found.candidates[1:]]
    evaluation = {
        key if key == "y" else name: array for key, array in read_arrays(subject.evaluation).items()
    }
    judge = Judge(evaluation, subject.work.metric, open_file(source.model, name, 1))
    scores = [judge.score(open_file(one.model, name, 1)) for one in files]
    rows = [
        Row(
            one.label,
            len(one.model.content),
            None if one is rival else one.snr_db,
            score,
            100 * (scores[0] - score),
        )
        for one, score in zip(files, scores, strict=True)
    ]
    for threads in (1, 2):
        sessions = {str(place): open_file(one.model, name, threads) for place, one in enumerate(files)}
        feed = next(judge.feeds())
        calls = {key: partial(session.run, feed) for key, session in sessions.items()}
        latencies = list(measure_latency(calls, LIMITS).values())
        for row, latency in zip(rows, latencies, strict=True):
            row.ratios.append(latency.ratio_to(latencies[0]))
            row.milliseconds.append(1e3 * latency.median_s)
    return rows, seconds


def open_file(model: Model, name: str, threads: int) -> Renamed:
    """A session that takes the samples under the name of the float file's input."""
    return Renamed(LiteRtSession(model.content, LiteRtOptions(threads=threads)), name)


def choose(rows: list[Row]) -> Row:
    """The fastest of ours that keeps the drop; of equally fast ones the smallest."""
    most = rows[1].drop_points + MORE_DROP_POINTS
    keeping = [row for row in (rows[0], *rows[2:]) if row.drop_points <= most + 1e-9]
    fastest = min(row.ratios[0] for row in keeping)
    near = [row for row in keeping if row.ratios[0] <= fastest * (1 + SAME_LATENCY)]
    return min(near, key=lambda row: row.model_bytes)


def table(work: Work, rows: list[Row], seconds: float) -> str:
    """The rows as a table; docs/benchmarks/engines.md has the chosen ones."""
    chosen = choose(rows)
    lines = [f"`{work.name}`, {work.samples}; score: {work.metric}; search {seconds:.0f} s", ""]
    lines += [
        "| file | size | SNR | score | drop | x float, 1 thread | 2 threads | ms |",
        "|---|" + "---|" * 7,
    ]
    for row in rows:
        snr = "" if row.snr_db is None else f"{row.snr_db:.1f} dB"
        label = f"**{row.label}**" if row is chosen else row.label
        lines.append(
            f"| {label} | {row.model_bytes / 1e3:.1f} kB | {snr} | {row.score:.4f} | {row.drop_points:+.2f} |"
            f" {row.ratios[0]:.3f} | {row.ratios[1]:.3f} | {row.milliseconds[0]:.3f} |"
        )
    drop = rows[1].drop_points + MORE_DROP_POINTS
    share = chosen.model_bytes / rows[1].model_bytes
    goals = (
        f"Goals: drop {chosen.drop_points:+.2f} of at most {drop:+.2f}; latency {chosen.ratios[0]:.3f} and"
        f" {chosen.ratios[1]:.3f} of at most {LATENCY_GOAL}; size {share:.2f} of the vendor's."
    )
    return "\n".join([*lines, "", goals])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(FILES), default=list(FILES))
    parser.add_argument("--search-s", type=float, default=30.0, help="time for mixing precisions")
    options = parser.parse_args()
    print(f"Taken on: {machine()}")
    for subject in list_subjects(options.only):
        rows, seconds = benchmark(subject, options.search_s)
        print(f"\n{table(subject.work, rows, seconds)}")


if __name__ == "__main__":
    main()
