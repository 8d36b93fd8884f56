"""Scores of static int8 models whose weights have few bits, and the bytes in which they travel.

    python benchmarks/compression.py [--only NAME] [--bits 8 4 3]

Each model of `works.py` is quantized as the search does, per channel with ranges of least error, and its
weights are rounded to nearest and by second-order rounding. Nearest codes of fewer bits have the scale of the
channel's largest weight. Scores are on the evaluation samples, which nothing else sees.
"""

import telemetry_off  # noqa: F401

import lzma
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

import metrics
from edgekit_toolkit.compress.compression import CodedWeight, Compression
from edgekit_toolkit.compress.sequential import round_weights
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.layers import find_layers
from edgekit_toolkit.passes.optimiser import optimise
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.clipping import least_error_range
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.scheme import ASYMMETRIC, fake_quantize
from edgekit_toolkit.samples.generated import Feeds
from public_models import MissingError
from results import machine, make_parser, print_head, print_row
from works import WORKS, Arrays, Work

THREADS = 2
CALIBRATION_SAMPLES = 200
HISTOGRAM_SAMPLES = 32


def list_feeds(arrays: Arrays) -> list[Feeds]:
    names = [name for name in arrays if name != "y"]
    count = len(arrays[names[0]])
    return [{name: arrays[name][place : place + 1] for name in names} for place in range(count)]


def round_to_nearest(floats: onnx.ModelProto, bits: int) -> Compression:
    """Return the nearest codes of all weights, with the scale of each channel's largest weight."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in floats.graph.initializer}
    peak = 2 ** (bits - 1) - 1
    weights = {}
    for layer in find_layers(floats):
        rows = layer.to_rows(constants[layer.weight])
        scale = np.maximum(np.abs(rows).max(axis=2, keepdims=True), 1e-30) / peak
        codes = layer.from_rows(np.rint(rows / scale)).astype(np.int8)
        weights[layer.weight] = CodedWeight(codes, scale.reshape(-1).astype(np.float32))
    return Compression(weights)


def score(work: Work, model: Model, source: Model, evaluation: Arrays) -> float:
    """Return the share of right answers, or of answers that agree with the source's, 0..1."""
    outputs, references = ([], [])
    for run, results in ((model.open(threads=THREADS), outputs), (source.open(threads=THREADS), references)):
        results.extend(run(feeds)[0] for feeds in list_feeds(evaluation))
    labels = evaluation.get("y")
    if work.metric == "mask_iou":
        pairs = zip(outputs, references, strict=True)
        return float(np.mean([metrics.mask_iou({"y": ours}, {"y": theirs}, None) for ours, theirs in pairs]))
    answers, wanted = (
        np.concatenate(rows).reshape(len(rows), -1).argmax(1) for rows in (outputs, references)
    )
    return float((answers == (wanted if labels is None else labels)).mean())


def compress(work: Work, all_bits: list[int]) -> Iterator[tuple[str, float, int, int, float]]:
    """Yield label, score, bytes of the model, bytes after xz and processor seconds of each form."""
    path = work.find_model()
    calibration, evaluation = work.load()
    samples = list_feeds(calibration)[:CALIBRATION_SAMPLES]
    source = onnx.load(path)
    floats = onnx.shape_inference.infer_shapes(optimise(source, batch=None, feeds=samples[:1]).model)
    quantizer = OnnxQuantizer(floats, ASYMMETRIC, threads=THREADS)
    kernels = quantizer.kernels(elementwise=True)
    ranges = quantizer.ranges(kernels, lambda: iter(samples), lambda: None)
    whole = {name: item.whole() for name, item in ranges.items()}
    histograms = quantizer.histograms(kernels, samples[:HISTOGRAM_SAMPLES], whole)
    narrow = {name: least_error_range(item, symmetric=False) for name, item in histograms.items()}
    plan = Plan(quantizer.scheme, frozenset(kernels), {**whole, **narrow})
    base = Form(forms.STATIC_INT8, plan)
    reference = OnnxModel(source)

    def quantize(name: str, values: NDArray[Any]) -> NDArray[Any]:
        return fake_quantize(values, *plan.ranges[name], plan.scheme) if name in plan.ranges else values

    def row(label: str, form: Form, seconds: float) -> tuple[str, float, int, int, float]:
        model = quantizer.build(form) or reference
        packed_bytes = len(lzma.compress(model.content, preset=9))
        return label, score(work, model, reference, evaluation), len(model.content), packed_bytes, seconds

    yield row("float32", Form(forms.FLOAT32), 0.0)
    yield row("int8", base, 0.0)
    for bits in all_bits:
        yield row(f"{bits} bits, nearest", replace(base, compression=round_to_nearest(floats, bits)), 0.0)
        begin = time.process_time()
        peak = 2 ** (bits - 1) - 1
        rounded = round_weights(floats, samples, peak=peak, threads=THREADS, quantize=quantize)
        seconds = time.process_time() - begin
        yield row(f"{bits} bits, second order", replace(base, compression=rounded), seconds)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", help="name of one work")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 6, 4, 3])
    options = parser.parse_args()
    print(machine())
    print_head("model", "weights", "score", "model bytes", "xz -9", "processor seconds")
    for work in WORKS:
        if options.only not in (None, work.name):
            continue
        try:
            for label, share, size, packed, seconds in compress(work, options.bits):
                print_row(
                    work.name, label, f"{100 * share:.2f} %", f"{size:,}", f"{packed:,}", f"{seconds:.1f}"
                )
        except MissingError as error:
            print(f"{work.name}: {error}")


if __name__ == "__main__":
    main()
