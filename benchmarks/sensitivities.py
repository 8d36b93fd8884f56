"""Compares the noise of all layers by error propagation with one layer at a time: time and order.

    python benchmarks/sensitivities.py MODEL.onnx SAMPLES.npz [--samples 16] [--propagated 16] [--every 1]

Both see the same static int8 plan, and the same samples unless fewer are propagated.
`--every 3` measures each third layer alone.
"""

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray
from scipy.stats import spearmanr

from edgekit_toolkit.importers.onnx import load_onnx
from edgekit_toolkit.passes.optimiser import optimise
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.scheme import ASYMMETRIC
from edgekit_toolkit.quantize.sensitivity import Fidelity, measure_blocks
from results import machine, make_parser

T = TypeVar("T")


def timed(name: str, call: Callable[[], T]) -> T:
    wall_s, processor_s = time.perf_counter(), time.process_time()
    result = call()
    wall_s, processor_s = time.perf_counter() - wall_s, time.process_time() - processor_s
    print(f"{name}: {processor_s:.1f} s of processor time, {wall_s:.1f} s on the clock")
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument(
        "--propagated", type=int, help="samples to propagate; default: all. The search takes 16"
    )
    parser.add_argument("--every", type=int, default=1, help="measure every nth layer alone")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    model, data, count, threads = options.model, options.data, options.samples, options.threads
    print(machine())
    source = load_onnx(model)
    (spec,) = source.inputs
    samples = [{spec.name: row[None]} for row in islice(np.load(data)[spec.name], count)]
    floats = onnx.shape_inference.infer_shapes(
        optimise(source.model.proto, batch=None, feeds=samples[:1]).model
    )
    quantizer = OnnxQuantizer(floats, ASYMMETRIC, threads=threads)
    kernels = quantizer.kernels(elementwise=True)
    ranges = quantizer.ranges(kernels, lambda: iter(samples), lambda: None)
    plan = Plan(ASYMMETRIC, frozenset(kernels), {name: item.whole() for name, item in ranges.items()})

    def compared_with(feeds: list[dict[str, NDArray[Any]]]) -> Fidelity:
        return Fidelity(
            quantizer.model,
            feeds,
            threads=threads,
            softmax_axes=quantizer.softmax_axes(),
            parts=quantizer.output_parts(samples[0]),
        )

    few, all_samples = compared_with(samples[: options.propagated]), compared_with(samples)
    noises = timed(
        f"all layers, {len(samples[: options.propagated])} samples propagated",
        lambda: list(quantizer.block_noises(plan, {}, few, lambda: False)),
    )[:: options.every]
    parts, write = [item.block for item in noises], quantizer.writer({})
    measured = timed(
        f"{len(parts)} layers, one at a time, {len(samples)} samples",
        lambda: list(measure_blocks(write, plan, parts, all_samples, lambda: False)),
    )
    pairs = [(block.noise, alone.noise) for block, alone in zip(noises, measured, strict=True)]
    print(f"rank correlation {spearmanr(*zip(*pairs, strict=True)).statistic:.3f}")


if __name__ == "__main__":
    main()
