"""Float32 and static int8 of a model on onnxruntime and OpenVINO: processor time of one thread, in turns.

    python benchmarks/openvino_forms.py MODEL.onnx        # with a Python that has OpenVINO

The environment `ONEDNN_MAX_CPU_ISA=AVX2` shows OpenVINO without AVX-512 and VNNI. Ranges are those of
generated inputs: times do not depend on them, accuracy would.
"""

import sys
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Final

import onnx

from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.models.openvino import OpenVinoModel
from edgekit_toolkit.quantize import scheme
from edgekit_toolkit.samples.generated import generate_feeds
from silu_forms import TURNS, quantize
from turns import take_turns

_MIN_OPSET: Final = 13


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
    calls = {name: partial(candidate.open(threads=1), feeds[0]) for name, candidate in runs.items()}
    seconds = take_turns(calls, TURNS, thread_time)
    reference_s = min(seconds["onnxruntime float32"])
    for name, times_s in seconds.items():
        print(f"{name:32} {min(times_s) * 1e3:8.3f} ms  {min(times_s) / reference_s:.2f}")


if __name__ == "__main__":
    main()
