"""Print estimated against measured peak memory for every model that is here.

    python benchmarks/memory_estimate.py

Models: ../shared/models, their int8 forms (static QDQ, per channel, calibrated on generated inputs: sizes are
right, accuracy is not), PP-OCRv4 from a folder (--ocr) and the light_* graphs that the onnx package carries.
What is absent is skipped with a line.
"""

import telemetry_off  # noqa: F401

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from edgekit_runtime.errors import EdgekitError
from edgekit_toolkit.feeds import Feeds, generate_feeds
from edgekit_toolkit.measure import measure_peak_memory
from edgekit_toolkit.memory import estimate_peak_memory
from edgekit_toolkit.specs import tensor_specs

ROOT = Path(__file__).resolve().parents[1]
MIB = 1024 * 1024
OCR = {
    "ch_PP-OCRv4_det_infer": (1, 3, 640, 640),
    "ch_PP-OCRv4_rec_infer": (1, 3, 48, 320),
    "ch_ppocr_mobile_v2.0_cls_infer": (1, 3, 48, 192),
}
LIGHT = (
    *("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet"),
    *("vgg19", "zfnet512"),
)


@dataclass(frozen=True)
class Case:
    name: str
    model: onnx.ModelProto
    dims: dict[str, int]


class GeneratedData(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    def __init__(self, feeds: Sequence[Feeds]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> Feeds | None:
        return next(self._feeds, None)


def skip(what: object, why: object) -> None:
    print(f"skipped {what}: {why}", file=sys.stderr)


def load(path: Path, shape: Sequence[int] = ()) -> Case:
    model = onnx.load(path)
    dims = {}
    for spec in tensor_specs(model)[0]:
        dims.update(
            {name: size for name, size in zip(spec.shape, shape, strict=False) if isinstance(name, str)}
        )
    return Case(path.stem, model, dims)


def int8(case: Case, folder: Path) -> Case | None:
    """The int8 form of a model, or None where it cannot be made."""
    # Per-channel scales need opset 13.
    versions = [item.version for item in case.model.opset_import if item.domain == ""]
    model = case.model if max(versions) >= 13 else onnx.version_converter.convert_version(case.model, 13)
    source, prepared, target = (
        folder / f"{case.name}-{step}.onnx" for step in ("source", "prepared", "int8")
    )
    onnx.save(model, source)
    try:
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        feeds = generate_feeds(tensor_specs(model)[0], 2, 0, case.dims)
        quantize_static(
            str(prepared),
            str(target),
            GeneratedData(feeds),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
    except Exception as error:  # whatever the quantizer cannot do
        skip(f"{case.name} int8", f"cannot be made: {str(error)[:100]}")
        return None
    return Case(f"{case.name} int8", onnx.load(target), case.dims)


def cases(shared: Path, ocr: Path | None) -> Iterator[Case]:
    floats = [load(path) for path in sorted(shared.glob("*.onnx"))]
    if not floats:
        skip(shared, "no models there")
    for stem, shape in OCR.items():
        path = (ocr or Path()) / f"{stem}.onnx"
        if path.exists():
            floats.append(load(path, shape))
        else:
            skip(stem, "give its folder with --ocr")
    yield from floats
    with tempfile.TemporaryDirectory() as folder:
        for case in floats:
            quantized = int8(case, Path(folder))
            if quantized is not None:
                yield quantized
    for name in LIGHT:
        path = Path(onnx.__file__).parent / f"backend/test/data/light/light_{name}.onnx"
        if path.exists():
            yield load(path)
        else:
            skip(path.name, "not in this version of onnx")


def row(case: Case, threads: int) -> dict[str, Any]:
    feeds = generate_feeds(tensor_specs(case.model)[0], 1, 0, case.dims)[0]
    measured = measure_peak_memory(case.model.SerializeToString(), feeds, threads=threads)
    estimate = estimate_peak_memory(
        case.model, engine_bytes=measured.engine_bytes, dims=case.dims, threads=threads
    )
    return {
        "model": case.name,
        "file_bytes": case.model.ByteSize(),
        "peak_of": "load" if estimate.load_peak_bytes == estimate.total_bytes else "run",
        "engine_bytes": measured.engine_bytes,
        "estimate_bytes": estimate.total_bytes,
        "measured_bytes": measured.total_bytes,
        "error": estimate.total_bytes / measured.total_bytes - 1,
        "model_estimate_bytes": estimate.model_bytes,
        "model_measured_bytes": measured.model_bytes,
        "model_error": estimate.model_bytes / measured.model_bytes - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--shared", type=Path, default=ROOT.parent / "shared/models/models", help="folder of models"
    )
    parser.add_argument("--ocr", type=Path, help="folder of the PP-OCRv4 models (rapidocr-onnxruntime)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object in the place of a table")
    options = parser.parse_args()
    rows = []
    if not options.json:
        print(
            "| model | file | peak | estimate | measured | error | model part: estimate | measured | error |"
        )
        print("|---|--:|---|--:|--:|--:|--:|--:|--:|")
    for case in cases(options.shared, options.ocr):
        try:
            figures = row(case, options.threads)
        except EdgekitError as error:
            skip(case.name, error)
            continue
        rows.append(figures)
        if not options.json:
            print(
                f"| {figures['model']} | {figures['file_bytes'] / MIB:.2f} | {figures['peak_of']} |"
                f" {figures['estimate_bytes'] / MIB:.1f} | {figures['measured_bytes'] / MIB:.1f} |"
                f" {figures['error']:+.1%} | {figures['model_estimate_bytes'] / MIB:.2f} |"
                f" {figures['model_measured_bytes'] / MIB:.2f} | {figures['model_error']:+.1%} |",
                flush=True,
            )
    if options.json:
        host = {
            "machine": platform.machine(),
            "onnxruntime": onnxruntime.__version__,
            "threads": options.threads,
        }
        print(json.dumps({"host": host, "rows": rows}, indent=1))
    elif rows:
        worst = max(rows, key=lambda figures: abs(figures["error"]))
        print(
            f"\nEngine {worst['engine_bytes'] / MIB:.1f} MiB; worst {worst['error']:+.1%}: {worst['model']}"
        )


if __name__ == "__main__":
    main()
