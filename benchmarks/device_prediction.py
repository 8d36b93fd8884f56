"""Latency and peak memory on a slowed device: predicted here, beside what was measured there.

    scripts/python benchmarks/device_prediction.py \
        [--folder ../shared/models/models] [--only NAME ...] [--share 0.33 0.2 0.1] [--seconds 50] \
        [--engine ort] [--no-memory] [--json FILE]

Models: models/tiny and those of `--folder`. The device is emulated (needs root).

- Latency, on a share of one processor of this machine; share 1 is all processors, on which onnxruntime takes
  as many threads. Ratios are fitted on `calibration_networks`; the models shown took no part in it. ONNX
  models run in onnxruntime, `.tflite` models in LiteRT.
- Peak memory, on the bench `constrained`: what `edgekit package` states, beside the peak of a process there
  that opens the model and runs it. For a .tflite both are measured, each in a process of its own.

Three shares take about 6 minutes at rest. `--seconds` is the length of one measurement on the device.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgekit_hil.benches.bench_file import find_bench
from edgekit_hil.benches.opening import open_bench
from edgekit_hil.tests.test_figures import measure
from edgekit_offload.profiling.machine import Machine, RunnableGraph, time_batches
from edgekit_toolkit.costs.device_transfer import fit_ratios
from edgekit_toolkit.evaluation.judge import find_memory
from edgekit_toolkit.measurement.calibration_networks import make_calibration_models
from edgekit_toolkit.measurement.device_profile import HOST_S
from edgekit_toolkit.measurement.host_run import measure_host_runs
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.samples.generated import generate_feeds
from edgekit_toolkit.targets.loader import load_target
from memory_estimate import Case, load, write
from results import machine, make_parser, print_head, print_row, write_json

ROOT = Path(__file__).resolve().parent.parent
GOAL = 0.1
MB = 1e6


def find_models(folders: Sequence[Path], only: Sequence[str]) -> list[Case]:
    paths = [
        path
        for folder in folders
        for path in sorted(folder.iterdir())
        if path.suffix in {".onnx", ".tflite"} and (not only or path.name in only or path.stem in only)
    ]
    return [load(path) for path in paths]


def predict_latencies(
    models: Mapping[str, Model], engine: str, shares: Sequence[float], seconds: float
) -> Iterator[dict[str, Any]]:
    """Print a table for each share; yields its rows."""
    networks = make_calibration_models(engine)
    here = {}
    for name, model in models.items():
        (feeds,) = generate_feeds(model.specs()[0], 1, 0)
        here[name] = measure_host_runs([(model, feeds)], engine, HOST_S)  # as `edgekit package` does it
    graphs = [RunnableGraph(each.content) for each in (*networks.values(), *models.values())]
    for share in shares:
        machine = Machine.parse("local" if share == 1 else f"local@{share:.0%}")
        measured = time_batches(machine, graphs, seconds=seconds, engine=engine)
        there = dict(zip([*networks, *models], measured.timings, strict=True))
        network_s = [there[name].seconds for name in networks]
        device = f"{share:.0%} of one processor" if share < 1 else f"all {measured.machine.cores} processors"
        print(f"\n{measured.machine.engine}, {device}")
        print_head("model | here, ms | predicted, ms | measured, ms | times as long | error, % | spread, %")
        errors, fits = [], []
        for name in models:
            fits.append(fit_ratios(list(here[name].networks.values()), network_s, may_share=engine == "ort"))
            (run,) = here[name].models
            predicted_s, timing = fits[-1].predict_s(run), there[name]
            errors.append(predicted_s / timing.seconds - 1)
            cells = [1e3 * run.whole_s, 1e3 * predicted_s, 1e3 * timing.seconds, timing.seconds / run.whole_s]
            shares = f"{errors[-1]:+.1%}", f"{timing.spread:.1%}"
            print_row(name, *(f"{cell:.3g}" for cell in cells), *shares)
            yield {
                "engine": engine,
                "share": share,
                "model": name,
                "here_s": run.whole_s,
                "predicted_s": predicted_s,
                "measured_s": timing.seconds,
                "spread": timing.spread,
                "error": errors[-1],
            }
        print_summary(f"latency on {engine} at {share:.0%}", errors)
        fitted = fits[-1]
        ratios = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in fitted.ratios.items())
        sharing = f"kernels much longer than {fitted.sharing.alone_s * 1e6:.0f} us {fitted.sharing.share:.0%}"
        print(f"one fit: {ratios}, {fitted.s_per_spilled_byte * 1e12:.0f} us for a spilled MB, {sharing}")
        left_out = dict(zip(networks, fitted.errors, strict=True))
        print("networks left out: " + ", ".join(f"{name} {error:+.1%}" for name, error in left_out.items()))
        print(f"their worst: {fitted.uncertainty:.2f} x", flush=True)


def predict_memory(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Print a table of peak memory on the bench `constrained`; yields its rows."""
    target, errors = load_target("x86-64"), []
    print()
    print_head("model", "stated, MB", "engine's part", "peak on `constrained`, MB", "error, %")
    with (
        tempfile.TemporaryDirectory() as folder,
        open_bench(find_bench("constrained")) as bench,
        bench.open_folder("prediction", "benchmarks/device_prediction.py") as device,
    ):
        for case in cases:
            feeds = generate_feeds(case.model.specs()[0], 1, 0, case.dims)[0]
            stated = find_memory(case.model, target, case.dims, feeds)
            if isinstance(stated, str):
                print(f"| {case.name} | {stated} | | | |", flush=True)
                continue
            package = write(Path(folder), case.model, feeds)
            if not errors:
                (key,) = (Path(folder) / "keys").glob("*.pub.pem")
                device.edgekit("keys", "trust", device.put(key, "bench.pub.pem"))
            peak_bytes = measure(device, package, 1.0)["peak_bytes"]
            errors.append(stated.total_bytes / peak_bytes - 1)
            cells = [each / MB for each in (stated.total_bytes, stated.engine_bytes, peak_bytes)]
            print_row(case.name, *(f"{cell:.1f}" for cell in cells), f"{errors[-1]:+.1%}")
            yield {
                "model": case.name,
                "stated_bytes": stated.total_bytes,
                "engine_bytes": stated.engine_bytes,
                "peak_bytes": peak_bytes,
                "error": errors[-1],
            }
    print_summary("peak memory", errors)


def print_summary(what: str, errors: Sequence[float]) -> None:
    within = sum(abs(error) <= GOAL for error in errors)
    worst = max(errors, key=abs)
    print(f"{what}: within {GOAL:.0%}: {within} of {len(errors)}; worst {worst:+.1%}", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, action="append", default=[], help="further models")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these models alone")
    parser.add_argument("--share", type=float, nargs="*", default=[0.33, 0.2, 0.1])
    parser.add_argument("--seconds", type=float, default=50.0, help="length of a measurement of latency")
    parser.add_argument("--engine", nargs="+", default=["ort", "litert"], choices=["ort", "litert"])
    parser.add_argument("--no-memory", action="store_true", help="predict latency alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = find_models([ROOT / "models/tiny", *args.folder], args.only)
    memory = [] if args.no_memory else list(predict_memory(cases))
    latency = []
    for engine in args.engine if args.share else ():
        models = {case.name: case.model for case in cases if case.model.engine == engine}
        latency += predict_latencies(models, engine, args.share, args.seconds)
    write_json(args.json, {"machine": machine(), "latency": latency, "memory": memory})


if __name__ == "__main__":
    main()
