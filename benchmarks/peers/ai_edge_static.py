"""Quantize one float `.tflite` with ai-edge-quantizer: int8 activations, weights of 8, 4 or 2 bits.

    python ai_edge_static.py MODEL.tflite CALIBRATION.npz OUTPUT [--algorithm OCTAV] [--bits 4]

The algorithm rounds convolutions and matrix products. Depthwise convolutions have no kernel with fewer than 8
bits and keep 8.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from ai_edge_quantizer import qtyping, quantizer
from ai_edge_quantizer.algorithm_manager import AlgorithmName
from numpy.typing import NDArray

THREADS = 2
OPERATORS = qtyping.TFLOperationName
FEW_BITS = (OPERATORS.CONV_2D, OPERATORS.FULLY_CONNECTED)
PRODUCTS = (*FEW_BITS, OPERATORS.DEPTHWISE_CONV_2D)


def read_samples(path: Path, name: str) -> list[dict[str, NDArray[Any]]]:
    """Return each sample alone, for the input `name` of the model."""
    with np.load(path) as data:
        array = data[next(key for key in data.files if key != "y")]
    return [{name: array[index : index + 1]} for index in range(len(array))]


def quantize(
    source: Path, calibration: Path, target: Path, *, algorithm: AlgorithmName, bits: int, float_io: bool
) -> None:
    signatures = Interpreter(str(source)).get_signature_list()
    (signature, names), *_ = signatures.items()
    tool = quantizer.Quantizer(str(source))
    tool.add_static_config(".*", OPERATORS.ALL_SUPPORTED, 8, 8)
    for operator in PRODUCTS:
        tool.add_static_config(
            ".*",
            operator,
            activation_num_bits=8,
            weight_num_bits=bits if operator in FEW_BITS else 8,
            algorithm_key=algorithm,
        )
    for operator in (OPERATORS.INPUT, OPERATORS.OUTPUT) if float_io else ():
        tool.update_quantization_recipe(".*", operator, algorithm_key=AlgorithmName.NO_QUANTIZE)
    samples = read_samples(calibration, names["inputs"][0])
    ranges = tool.calibrate({signature: samples}, num_threads=THREADS)
    tool.quantize(ranges).export_model(str(target), overwrite=True)


def quantize_weights(source: Path, target: Path) -> None:
    """Quantize weights alone; the engine quantizes activations as it runs."""
    tool = quantizer.Quantizer(str(source))
    tool.add_dynamic_config(".*", OPERATORS.ALL_SUPPORTED, 8)
    tool.quantize().export_model(str(target), overwrite=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--algorithm", type=AlgorithmName, default=AlgorithmName.MIN_MAX_UNIFORM_QUANT)
    parser.add_argument("--bits", type=int, default=8, help="of weights")
    parser.add_argument("--float-io", action="store_true", help="inputs and outputs stay float32")
    parser.add_argument("--dynamic", action="store_true", help="weights alone")
    arguments = parser.parse_args()
    if arguments.dynamic:
        quantize_weights(arguments.model, arguments.output)
        return
    quantize(
        arguments.model,
        arguments.calibration,
        arguments.output,
        algorithm=arguments.algorithm,
        bits=arguments.bits,
        float_io=arguments.float_io,
    )


if __name__ == "__main__":
    main()
