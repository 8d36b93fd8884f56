"""Scores of static int8 models whose weights have few bits, and the bytes in which they travel.

    python benchmarks/compression.py [--only NAME] [--bits 8 4 3]
    python benchmarks/compression.py --distil [--only NAME] [--multiple 16] [--unlabelled 250]

Each model of `works.py` is quantized as the search does, per channel with ranges of least error, and its
weights are rounded to nearest and by second-order rounding. Nearest codes of fewer bits have the scale of the
channel's largest weight. Scores are on the evaluation samples, which nothing else sees.

With `--distil` channels go, then the pruned models are trained on the float model's outputs, unless held-back
samples refuse that. `--unlabelled` takes so many samples of the evaluation for it, without their labels.
"""

import lzma
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekit_runtime.errors import EdgekitError
from edgekit_toolkit.compress.compression import CodedWeight, Compression
from edgekit_toolkit.compress.distillation import distil
from edgekit_toolkit.compress.pruning import prune
from edgekit_toolkit.compress.sequential import round_weights
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.layers import find_layers
from edgekit_toolkit.passes.optimiser import optimise
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.clipping import least_error_range
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.quantize.scheme import ASYMMETRIC, fake_quantize
from edgekit_toolkit.quantize.sensitivity import Fidelity, softmax_axes
from edgekit_toolkit.samples.generated import Feeds
from judging import THREADS, Judge, read_arrays
from public_models import MissingError
from results import machine, make_parser, print_head, print_row
from works import WORKS, Arrays, Subject, Work, list_subjects

CALIBRATION_SAMPLES = 200
# Of pruned models: multiply-adds that go, and steps of training.
SHARES = (0.25, 0.38)
STEPS = 400
NOISE_SAMPLES = 16
DISTILLED = ("dscnn", "mnist5k_dscnn", "vww", "resnet8")
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


def read_model(path: Path, samples: list[Feeds]) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return a model as it is, and optimised."""
    source = onnx.load(path)
    return source, onnx.shape_inference.infer_shapes(optimise(source, batch=None, feeds=samples[:1]).model)


def find_static(quantizer: Quantizer, samples: list[Feeds]) -> Form:
    """Return the static int8 form of all kernels, per channel with ranges of least error."""
    kernels = quantizer.kernels(elementwise=True)
    ranges = quantizer.ranges(kernels, lambda: iter(samples), lambda: None)
    whole = {name: item.whole() for name, item in ranges.items()}
    histograms = quantizer.histograms(kernels, samples[:HISTOGRAM_SAMPLES], whole)
    narrow = {name: least_error_range(item, symmetric=False) for name, item in histograms.items()}
    return Form(forms.STATIC_INT8, Plan(quantizer.scheme, frozenset(kernels), {**whole, **narrow}))


def quantize_static(floats: onnx.ModelProto, samples: list[Feeds]) -> tuple[OnnxQuantizer, Form]:
    quantizer = OnnxQuantizer(floats, ASYMMETRIC, threads=THREADS)
    return quantizer, find_static(quantizer, samples)


def compress(work: Work, all_bits: list[int]) -> Iterator[tuple[str, float, int, int, float]]:
    """Yield label, score, bytes of the model, bytes after xz and processor seconds of each form."""
    calibration, evaluation = work.load()
    samples = list_feeds(calibration)[:CALIBRATION_SAMPLES]
    source, floats = read_model(work.find_model(), samples)
    quantizer, base = quantize_static(floats, samples)
    plan = base.plan
    assert plan is not None
    reference = OnnxModel(source)
    judge = Judge(evaluation, work.metric, reference.open_session(threads=THREADS))

    def quantize(name: str, values: NDArray[Any]) -> NDArray[Any]:
        return fake_quantize(values, *plan.ranges[name], plan.scheme) if name in plan.ranges else values

    def row(label: str, form: Form, seconds: float) -> tuple[str, float, int, int, float]:
        model = quantizer.build(form) or reference
        packed_bytes = len(lzma.compress(model.content, preset=9))
        return (
            label,
            judge.score(model.open_session(threads=THREADS)),
            len(model.content),
            packed_bytes,
            seconds,
        )

    yield row("float32", Form(forms.FLOAT32), 0.0)
    yield row("int8", base, 0.0)
    for bits in all_bits:
        yield row(f"{bits} bits, nearest", replace(base, compression=round_to_nearest(floats, bits)), 0.0)
        begin = time.process_time()
        peak = 2 ** (bits - 1) - 1
        rounded = round_weights(floats, samples, peak=peak, threads=THREADS, quantize=quantize)
        seconds = time.process_time() - begin
        yield row(f"{bits} bits, second order", replace(base, compression=rounded), seconds)


def distil_pruned(subject: Subject, multiple: int, unlabelled: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each pruned model of a subject."""
    calibration, whole = read_arrays(subject.calibration), read_arrays(subject.evaluation)
    samples = list_feeds(calibration)[:CALIBRATION_SAMPLES]
    samples += list_feeds({name: values[:unlabelled] for name, values in whole.items()})
    evaluation = {name: values[unlabelled:] for name, values in whole.items()}
    source, floats = read_model(subject.model, samples)
    reference, metric = OnnxModel(source), "top1" if subject.work is None else subject.work.metric
    judge = Judge(evaluation, metric, reference.open_session(threads=THREADS))

    def show(model: onnx.ModelProto) -> str:
        """Return the scores of the float model and of its int8 form, rounded by second order."""
        quantizer, form = quantize_static(onnx.shape_inference.infer_shapes(model), samples)
        form = replace(form, compression=round_weights(model, samples, peak=127, threads=THREADS))
        models = (OnnxModel(model), quantizer.build(form) or reference)
        return ", ".join(f"{100 * judge.score(item.open_session(threads=THREADS)):.2f}" for item in models)

    yield "1.00", show(floats), "", "", ""
    fidelity = Fidelity(
        OnnxModel(floats), samples[:NOISE_SAMPLES], threads=THREADS, softmax_axes=softmax_axes(floats)
    )
    pruned = prune(
        floats,
        samples,
        shares=SHARES,
        multiple=multiple,
        threads=THREADS,
        measure_noise=lambda model: fidelity.noise(OnnxModel(model)),
    )
    for sliced in pruned:
        begin = time.process_time()
        try:
            result = distil(floats, sliced.model, samples, steps=STEPS)
            seconds = time.process_time() - begin
            noises = f"{100 * result.noise_before:.1f} to {100 * result.noise_after:.1f} %"
            better = "refused" if result.model is None else show(result.model)
        except EdgekitError as error:
            seconds, noises, better = 0.0, "", f"refused: {error}"
        share = count_macs(sliced.model) / count_macs(floats)
        yield f"{share:.2f}", show(sliced.model), better, noises, f"{seconds:.1f}"


def count_macs(model: onnx.ModelProto) -> int:
    sizes = [dim.dim_param for value in model.graph.input for dim in value.type.tensor_type.shape.dim]
    return sum(cost.macs for cost in OnnxModel(model).node_costs(dict.fromkeys(filter(None, sizes), 1)))


def print_distilled(only: str | None, multiple: int, unlabelled: int) -> None:
    print_head(
        "model", "multiply-adds", "pruned: float, int8", "distilled", "held-back noise", "processor seconds"
    )
    for subject in list_subjects(DISTILLED if only is None else [only]):
        for row in distil_pruned(subject, multiple, unlabelled):
            print_row(subject.name, *row)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", help="name of one work")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 6, 4, 3])
    parser.add_argument("--distil", action="store_true", help="prune and distil instead")
    parser.add_argument("--multiple", type=int, default=16, help="of channels, of pruned models")
    parser.add_argument("--unlabelled", type=int, default=0, help="evaluation samples to train by")
    options = parser.parse_args()
    print(machine())
    if options.distil:
        print_distilled(options.only, options.multiple, options.unlabelled)
        return
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
