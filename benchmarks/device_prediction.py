"""Latency on a slowed device, predicted from runs here after a calibration, beside what was measured there.

    PYTHONPATH=device_runtime:toolkit:offload:fleet:hil .venv/bin/python benchmarks/device_prediction.py \
        [--share 0.2 ...] [--json FILE] [MODEL.onnx ...]

The device is emulated: a share of one processor of this machine (needs root). Ratios are fitted on
`calibration_networks`; the models shown took no part in it. About two minutes a share.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import onnx

from edgekit_offload.profiling.machine import Machine, RunnableGraph, time_batches
from edgekit_runtime.remote.measurement.job_runner import make_inputs
from edgekit_runtime.sessions.ort import OrtOptions, create_session, make_settings
from edgekit_runtime.system.processor_speed import SpeedGate
from edgekit_toolkit.costs.device_transfer import fit_ratios, predict_latency_s
from edgekit_toolkit.measurement.calibration_networks import make_calibration_networks
from edgekit_toolkit.measurement.host_run import measure_host_run
from edgekit_toolkit.samples.generated import Feeds

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT / "models/tiny", ROOT.parent / "shared/models/models")


def find_models(named: Sequence[Path]) -> dict[str, onnx.ModelProto]:
    paths = list(named) or [path for folder in FOLDERS for path in sorted(folder.glob("*.onnx"))]
    return {path.stem: onnx.load(path) for path in paths}


def feeds_of(model: onnx.ModelProto) -> Feeds:
    return make_inputs(create_session(model.SerializeToString(), make_settings(OrtOptions()), ()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--share", type=float, nargs="+", default=[0.33, 0.2, 0.1])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    networks, models = make_calibration_networks(), find_models(args.models)
    everything = networks | models
    work_s = SpeedGate().usual_s
    here = {
        name: measure_host_run(model, feeds_of(model), work_s=work_s, seconds=1.0)
        for name, model in everything.items()
    }
    found = []
    for share in args.share:
        machine = Machine.parse(f"local@{share:.0%}")
        graphs = [RunnableGraph(model.SerializeToString()) for model in everything.values()]
        measured = time_batches(machine, graphs, seconds=50)
        there = dict(zip(everything, measured.timings, strict=True))
        fitted = fit_ratios([here[name] for name in networks], [there[name].seconds for name in networks])
        print(
            f"\n{share:.0%} of one processor; a network left out of the fit: off by"
            f" {fitted.uncertainty:.2f} x at most"
        )
        print(", ".join(f"{kind} {ratio:.2f}" for kind, ratio in fitted.ratios.items()))
        print("| model | here, ms | predicted, ms | measured, ms | error, % | spread, % |")
        print("| --- | --- | --- | --- | --- | --- |")
        errors = []
        for name in models:
            predicted_s, timing = predict_latency_s(here[name], fitted.ratios), there[name]
            errors.append(predicted_s / timing.seconds - 1)
            cells = (here[name].whole_s * 1e3, predicted_s * 1e3, timing.seconds * 1e3)
            print(
                f"| {name} | "
                + " | ".join(f"{cell:.3g}" for cell in cells)
                + f" | {100 * errors[-1]:+.1f} | {100 * timing.spread:.1f} |"
            )
            found.append(
                {
                    "share": share,
                    "model": name,
                    "here_s": here[name].whole_s,
                    "predicted_s": predicted_s,
                    "measured_s": timing.seconds,
                }
            )
        within = sum(abs(error) <= 0.1 for error in errors)
        print(f"within 10 %: {within} of {len(errors)}")
        for name, error in zip(networks, fitted.errors, strict=True):
            print(f"   {name:24} {100 * error:+.1f} {there[name].spread * 100:.0f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
