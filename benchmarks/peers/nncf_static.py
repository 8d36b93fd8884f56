"""Quantize one ONNX model with OpenVINO's NNCF, for OpenVINO.

    python nncf_static.py MODEL.onnx CALIBRATION.npz OUTPUT.xml [--preset mixed]

Without a preset it only converts. All calibration samples are used.
"""

import argparse
import os
from pathlib import Path

os.environ["NNCF_CI"] = "1"  # no telemetry

import nncf
import numpy as np
import openvino


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--preset", choices=("performance", "mixed"))
    arguments = parser.parse_args()
    with np.load(arguments.calibration) as data:
        array = data[next(name for name in data.files if name != "y")]
    model = openvino.convert_model(arguments.model)
    model.reshape([1, *array.shape[1:]])
    if arguments.preset:
        samples = [array[index : index + 1] for index in range(len(array))]
        preset = nncf.QuantizationPreset(arguments.preset)
        model = nncf.quantize(model, nncf.Dataset(samples), preset=preset, subset_size=len(samples))
    openvino.save_model(model, arguments.output, compress_to_fp16=False)


if __name__ == "__main__":
    main()
