"""Does onnxruntime's parallel execution mode ever win? Public models, two operators at once against one.

    scripts/python benchmarks/ort_execution_mode.py [--only NAME ...]

In turn in one process: one after another with one and with two threads, and two at once with one and with two
threads each. "heavy at once" is how many convolutions, products and recurrent layers stand side by side at
most; models of one are left out, two at once cannot help them. A model whose ratio is under 0.97 would gain.
"""

import telemetry_off  # noqa: F401

import onnx
import onnxruntime

from edgekit_runtime.sessions.latency import LatencyLimits, measure_latency
from public_models import PublicModel, make_public_parser, try_models
from public_samples import read_source, samples_of
from results import print_head

HEAVY = {"Conv", "ConvTranspose", "MatMul", "Gemm", "LSTM", "GRU"}
LIMITS = LatencyLimits(min_rounds=10, max_rounds=60, time_limit_s=10.0)
WAYS = {"1": (1, 1), "2": (1, 2), "2 at once": (2, 1), "2 at once, 2 threads": (2, 2)}


def heavy_at_once(graph: onnx.GraphProto) -> int:
    """How many heavy operators have the same number of heavy ones before them, at most."""
    before: dict[str, int] = {}
    counts: dict[int, int] = {}
    for node in graph.node:
        depth = max((before.get(name, 0) for name in node.input), default=0)
        if node.op_type in HEAVY:
            counts[depth] = counts.get(depth, 0) + 1
            depth += 1
        before.update(dict.fromkeys(node.output, depth))
    return max(counts.values(), default=0)


def open_way(model: bytes, operators: int, threads: int) -> onnxruntime.InferenceSession:
    """A session that runs so many operators at once, each with so many threads."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.inter_op_num_threads, settings.intra_op_num_threads = operators, threads
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.add_session_config_entry("session.inter_op.allow_spinning", "0")
    mode = onnxruntime.ExecutionMode
    settings.execution_mode = mode.ORT_PARALLEL if operators > 1 else mode.ORT_SEQUENTIAL
    return onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])


def measure(public: PublicModel) -> str | None:
    """One row, or None for a model without branches."""
    source, dims = read_source(public)
    count = heavy_at_once(source.graph)
    if count < 2:
        return None
    feeds = samples_of(public, source, dims).fresh[0]
    model = source.SerializeToString()
    sessions = {name: open_way(model, *way) for name, way in WAYS.items()}
    calls = {name: lambda one=one: one.run(None, dict(feeds)) for name, one in sessions.items()}
    found = measure_latency(calls, LIMITS)
    single = min(("1", "2"), key=lambda name: found[name].median_s)
    double = min(list(WAYS)[2:], key=lambda name: found[name].median_s)
    ratio = found[double].ratio_to(found[single])
    low, high = found[double].ratio_interval_to(found[single])
    times = " | ".join(f"{found[name].median_s * 1e3:.3f}" for name in WAYS)
    return f"| {public.name} | {count} | {times} | {ratio:.2f} ({low:.2f} to {high:.2f}) |"


def main() -> None:
    only = make_public_parser(__doc__).parse_args().only
    print_head("model", "heavy at once", *(f"{way} (ms)" for way in WAYS), "best at once / best of one")
    for row in filter(None, try_models(only, measure)):
        print(row, flush=True)


if __name__ == "__main__":
    main()
