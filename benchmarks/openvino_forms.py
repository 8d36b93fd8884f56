"""Float32 and static int8 of a model on onnxruntime and OpenVINO: processor time of one thread, in turns.

    python benchmarks/openvino_forms.py MODEL.onnx        # with a Python that has OpenVINO

The environment `ONEDNN_MAX_CPU_ISA=AVX2` shows OpenVINO without AVX-512 and VNNI. Ranges are those of
generated inputs: times do not depend on them, accuracy would.
"""

import telemetry_off  # noqa: F401

import sys
import time
from pathlib import Path
from typing import Final

import onnx

from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.models.openvino import OpenVinoModel
from edgekit_toolkit.quantize import forms, scheme
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.scheme import Scheme
from edgekit_toolkit.samples.generated import Feeds, generate_feeds

_TURNS: Final = 26
_MIN_OPSET: Final = 13


def quantize(model: onnx.ModelProto, codes: Scheme, feeds: list[Feeds]) -> onnx.ModelProto:
    quantizer = OnnxQuantizer(model, codes, threads=1)
    kernels = quantizer.kernels(elementwise=True)
    ranges = quantizer.ranges(kernels, lambda: iter(feeds), lambda: None)
    plan = Plan(codes, frozenset(kernels), {name: limits.whole() for name, limits in ranges.items()})
    built = quantizer.build(Form(forms.STATIC_INT8, plan))
    assert built is not None
    return built.proto


def main() -> None:
    model = onnx.load(Path(sys.argv[1]))
    if model.opset_import[0].version < _MIN_OPSET:
        model = onnx.version_converter.convert_version(model, 17)
    model = onnx.shape_inference.infer_shapes(model)
    feeds = generate_feeds(OnnxModel(model).specs()[0], 2, 0)
    runs = {"onnxruntime float32": OnnxModel(model), "OpenVINO float32": OpenVinoModel(model)}
    for codes in (scheme.ASYMMETRIC, scheme.ASYMMETRIC_7BIT, scheme.OPENVINO, scheme.OPENVINO_7BIT):
        quantized = quantize(model, codes, feeds)
        runs[f"onnxruntime {codes.name}"] = OnnxModel(quantized)
        runs[f"OpenVINO {codes.name}"] = OpenVinoModel(quantized)
    calls = {name: candidate.open(threads=1) for name, candidate in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_TURNS):
        for name, call in calls.items():
            begin_s = time.thread_time()
            call(feeds[0])
            seconds[name].append(time.thread_time() - begin_s)
    reference_s = min(seconds["onnxruntime float32"])
    for name, times_s in seconds.items():
        print(f"{name:32} {min(times_s) * 1e3:8.3f} ms  {min(times_s) / reference_s:.2f}")


if __name__ == "__main__":
    main()
