"""Latency of models with fewer channels in onnxruntime and LiteRT, as ratios to the model as it came.

    python benchmarks/pruned_latency.py [--only NAME ...] [--multiple 16] [--json FILE]
    python benchmarks/pruned_latency.py --dead

Models with all channels and pruned ones, in float32 and int8 (per channel, ranges of least error), take turns
on one thread, each a batch of some milliseconds. Times are those of the thread, so that other work on the
machine counts little. A share is of the multiply-adds that stay. VWW has dead channels and goes no further.
`--dead` measures nothing but what dead channels take in the float model of each work.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import thread_time

import onnx

from compression import count_macs, find_static, list_feeds
from edgekit_runtime.sessions.latency import Latency, LatencyLimits, measure_latency
from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_toolkit.compress.pruning import prune
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.passes.chain import replay
from edgekit_toolkit.passes.dead_channels import remove_dead_channels
from edgekit_toolkit.passes.optimiser import optimise
from edgekit_toolkit.quantize.sensitivity import Fidelity, softmax_axes
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.targets.loader import load_target
from judging import read_arrays
from results import machine, make_parser, print_head, print_row, write_json
from works import WORKS, Subject, list_subjects

SHARES = {"vww": (), "dscnn": (0.25, 0.4), "mnist5k_dscnn": (0.25, 0.4)}
SAMPLES = 16
DEAD_MULTIPLE = 8  # of channels that stay, as packaging has it
LIMITS = LatencyLimits(min_rounds=30, max_rounds=100, time_limit_s=2.5, precision=0.01, batch_s=0.002)
FLOAT, INT8 = "float32", "int8"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Latency of one pruned model.

    Attributes:
        macs: share of the multiply-adds that stay.
        ratio, low, high: latency as a multiple of the model's with all channels, and its 95 % interval.
    """

    model: str
    engine: str
    arithmetic: str
    macs: float
    ratio: float
    low: float
    high: float


def read_feeds(path: Path) -> list[Feeds]:
    return list_feeds(read_arrays(path))


def keep_dead_channels(source: onnx.ModelProto, samples: list[Feeds]) -> onnx.ModelProto:
    """Return the model after the passes of packaging but that for dead channels."""
    steps = optimise(source, batch=None, feeds=samples[:1]).steps
    applied = [
        (step.name, step.form) for step in steps if step.applied and step.name != "remove_dead_channels"
    ]
    return onnx.shape_inference.infer_shapes(replay(source, batch=None, applied=applied))


def make_pruned(
    name: str, floats: onnx.ModelProto, samples: list[Feeds], multiple: int
) -> list[onnx.ModelProto]:
    if SHARES[name]:
        fidelity = Fidelity(OnnxModel(floats), samples, threads=1, softmax_axes=softmax_axes(floats))
        sliced = prune(
            floats,
            samples,
            shares=SHARES[name],
            multiple=multiple,
            threads=1,
            measure_noise=lambda model: fidelity.noise(OnnxModel(model)),
        )
    else:
        sliced = [dead for dead in [remove_dead_channels(floats, multiple=multiple)] if dead]
    return [onnx.shape_inference.infer_shapes(item.model) for item in sliced]


def free_dims(model: onnx.ModelProto) -> dict[str, int]:
    """Return 1 for each free dimension: the batch."""
    shapes = [value.type.tensor_type.shape for value in model.graph.input]
    return {dim.dim_param: 1 for shape in shapes for dim in shape.dim if dim.dim_param}


def open_litert(model: Model) -> Callable[[Feeds], Feeds]:
    return LiteRtSession(model.content, LiteRtOptions(threads=1)).run


def open_ort(model: Model) -> Callable[[Feeds], Feeds]:
    return OrtSession(model.content, OrtOptions(threads=1)).run


ENGINES: Mapping[str, Callable[[Model], Callable[[Feeds], Feeds]]] = {"ort": open_ort, "litert": open_litert}


def measure(subject: Subject, multiple: int) -> Iterator[Row]:
    samples = read_feeds(subject.calibration)[:SAMPLES]
    floats = keep_dead_channels(onnx.load(subject.model), samples)
    models = [floats, *make_pruned(subject.name, floats, samples, multiple)]
    dims, macs = free_dims(floats), [count_macs(model) for model in models]
    for engine, open_session in ENGINES.items():
        maker = find_support(engine).maker
        calls = {}
        for number, model in enumerate(models):
            quantizer = maker.open_quantizer(
                OnnxModel(model), load_target("x86-64"), threads=1, dims=dims, feeds=samples[:1]
            )
            _, whole = quantizer.source_form()
            coded = quantizer.build(find_static(quantizer, samples))
            assert coded is not None
            for arithmetic, built in ((FLOAT, whole), (INT8, coded)):
                calls[f"{arithmetic} {number}"] = partial(open_session(built), samples[0])
        latencies = measure_latency(calls, LIMITS, clock=thread_time)
        for arithmetic in (FLOAT, INT8):
            reference = latencies[f"{arithmetic} 0"]
            for number, share in enumerate(macs[1:], start=1):
                latency: Latency = latencies[f"{arithmetic} {number}"]
                low, high = latency.ratio_interval_to(reference)
                yield Row(
                    model=subject.name,
                    engine=engine,
                    arithmetic=arithmetic,
                    macs=share / macs[0],
                    ratio=latency.ratio_to(reference),
                    low=low,
                    high=high,
                )


def print_dead() -> None:
    """Print size and multiply-adds of each work's float model with and without dead channels."""
    print_head("model", "kB with dead channels", "kB without", "multiply-adds that stay")
    for subject in list_subjects([work.name for work in WORKS]):
        floats = keep_dead_channels(onnx.load(subject.model), read_feeds(subject.calibration)[:1])
        sliced = remove_dead_channels(floats, multiple=DEAD_MULTIPLE)
        live = floats if sliced is None else sliced.model
        sizes = [f"{OnnxModel(model).size_bytes / 1e3:.1f}" for model in (floats, live)]
        print_row(subject.name, *sizes, f"{count_macs(live) / count_macs(floats):.2f}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--multiple", type=int, default=16, help="of channels that stay in a group")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--dead", action="store_true", help="sizes without dead channels, no latencies")
    options = parser.parse_args()
    if options.dead:
        print_dead()
        return
    host, rows = machine(), []
    print(host)
    print_head("model", "engine", "arithmetic", "multiply-adds", "x all channels", "95 %")
    for subject in list_subjects(options.only):
        for row in measure(subject, options.multiple):
            interval = f"{row.low:.2f} to {row.high:.2f}"
            print_row(row.model, row.engine, row.arithmetic, f"{row.macs:.2f}", f"{row.ratio:.2f}", interval)
            rows.append(asdict(row))
    write_json(options.json, {"machine": host, "rows": rows})


if __name__ == "__main__":
    main()
