"""Quantize one model with onnxruntime.quantization.

    python ort_static.py MODEL CALIBRATION.npz OUTPUT [--per-channel METHOD [--bits 4]]

By default everything is left as `quantize_static` has it: QDQ, int8 activations and weights, per tensor,
MinMax. `--per-channel METHOD` is the strongest plain recipe for x86-64: uint8 activations, int8 weights per
channel, and MinMax, Entropy or Percentile ranges. `--bits 4` stores the weights as int4.
"""

import argparse
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

# The first opset whose QuantizeLinear takes a scale for each channel, and the first with 4 bits.
OPSETS = {8: 13, 4: 21}
WEIGHTS = {8: QuantType.QInt8, 4: QuantType.QInt4}


class Samples(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    """Feeds one sample at a time; labels (`y`) are left out."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as data:
            self._inputs = {name: data[name] for name in data.files if name != "y"}
        self._feeds = self._all()

    def __len__(self) -> int:
        return len(next(iter(self._inputs.values())))

    def _all(self, start: int = 0, end: int | None = None) -> Iterator[dict[str, NDArray[Any]]]:
        for index in range(start, len(self) if end is None else end):
            yield {name: array[index : index + 1] for name, array in self._inputs.items()}

    def set_range(self, start_index: int, end_index: int) -> None:
        """Feed only these samples next: onnxruntime asks for it when it collects in portions."""
        self._feeds = self._all(start_index, end_index)

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        return next(self._feeds, None)


def quantize(
    source: Path, calibration: Path, target: Path, method: str | None, bits: int, *, reduce_range: bool
) -> None:
    options: dict[str, Any] = {"reduce_range": reduce_range}
    model = onnx.load(source)
    if method:
        options |= {
            "per_channel": True,
            "activation_type": QuantType.QUInt8,
            "weight_type": WEIGHTS[bits],
            "calibrate_method": CalibrationMethod[method],
        }
        if method != "MinMax":
            # Collect sample by sample: otherwise the activations of all samples are held in memory at once.
            options["extra_options"] = {"CalibStridedMinMax": 1}
        if next(item.version for item in model.opset_import if not item.domain) < OPSETS[bits]:
            model = onnx.version_converter.convert_version(model, OPSETS[bits])
    with tempfile.TemporaryDirectory() as folder:
        start, prepared = Path(folder, "start.onnx"), Path(folder, "prepared.onnx")
        onnx.save(model, start)
        # Symbolic shape inference needs sympy; without it the plain one does.
        without = importlib.util.find_spec("sympy") is None
        quant_pre_process(str(start), str(prepared), skip_symbolic_shape=without)
        quantize_static(str(prepared), str(target), Samples(calibration), **options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--per-channel", choices=("MinMax", "Entropy", "Percentile"))
    parser.add_argument("--bits", type=int, choices=WEIGHTS, default=8, help="of weights per channel")
    parser.add_argument("--reduce-range", action="store_true", help="weights of 7 bits, for x86 without VNNI")
    arguments = parser.parse_args()
    quantize(
        arguments.model,
        arguments.calibration,
        arguments.output,
        arguments.per_channel,
        arguments.bits,
        reduce_range=arguments.reduce_range,
    )


if __name__ == "__main__":
    main()
