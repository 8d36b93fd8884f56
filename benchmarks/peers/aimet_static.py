"""Quantize one ONNX model with aimet-onnx: int8 activations, weights of 8 or 4 bits a channel.

    PYTHON-OF-AIMET aimet_static.py MODEL CALIBRATION.npz OUTPUT [--method adaround] [--bits 4]

Batch normalizations are folded and ranges are those of least error (`tf_enhanced`), as AIMET's guide
recommends; sequential MSE takes `min_max` alone. AdaRound takes batches of 32 where the model does, and
15,000 iterations a layer, which AIMET recommends below 8 bits, unless told otherwise. Runs in the environment
that `compression_peers.py` makes.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import aimet_onnx  # type: ignore[import-not-found]  # it has an environment of its own
import numpy as np
import onnx
from aimet_onnx.batch_norm_fold import (  # type: ignore[import-not-found]
    fold_all_batch_norms_to_weight,
)
from aimet_onnx.common.quantsim_config import (  # type: ignore[import-not-found]
    config_utils,
)
from numpy.typing import NDArray

METHODS = ("nearest", "seq_mse", "adaround")
BATCH = 32
CONFIG = Path(config_utils.__file__).with_name("default_config_per_channel.json")


def read_batches(path: Path, model: onnx.ModelProto) -> list[dict[str, NDArray[Any]]]:
    has_free_batch = not model.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    size = BATCH if has_free_batch else 1
    with np.load(path) as data:
        arrays = {name: data[name] for name in data.files if name != "y"}
    count = len(next(iter(arrays.values())))
    return [
        {name: array[begin : begin + size] for name, array in arrays.items()}
        for begin in range(0, count - size + 1, size)
    ]


def drop_absent_inputs(model: onnx.ModelProto) -> None:
    """Remove the empty names of optional inputs at the end of a node's list: the export takes none."""
    for node in model.graph.node:
        while node.input and not node.input[-1]:
            node.input.pop()


def quantize(source: Path, calibration: Path, target: Path, options: argparse.Namespace) -> None:
    model = onnx.load(source)
    drop_absent_inputs(model)
    batches = read_batches(calibration, model)
    fold_all_batch_norms_to_weight(model)
    simulation = aimet_onnx.QuantizationSimModel(
        model,
        param_type=aimet_onnx.qtype.int(options.bits),
        activation_type=aimet_onnx.int8,
        quant_scheme="min_max" if options.method == "seq_mse" else "tf_enhanced",
        config_file=str(CONFIG),
    )
    if options.method == "seq_mse":
        aimet_onnx.apply_seq_mse(simulation, batches)
    elif options.method == "adaround":
        aimet_onnx.apply_adaround(simulation, batches, num_iterations=options.iterations)
    simulation.compute_encodings(itertools.chain(batches))
    onnx.save(simulation.to_onnx_qdq(export_int32_bias=True, prequantize_constants=True), target)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--method", choices=METHODS, default="nearest")
    parser.add_argument("--bits", type=int, default=8, help="of weights")
    parser.add_argument("--iterations", type=int, default=15_000, help="of AdaRound for a layer")
    arguments = parser.parse_args()
    quantize(arguments.model, arguments.calibration, arguments.output, arguments)


if __name__ == "__main__":
    main()
