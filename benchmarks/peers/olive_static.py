"""Quantize one model with Olive's pass OnnxStaticQuantization, everything else as Olive has it.

    PYTHON-OF-OLIVE olive_static.py MODEL CALIBRATION.npz OUTPUT [--per-channel [--bits 4]]

Runs in the environment that `quantization.py` makes.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

# Before Olive is imported: a benchmark sends nothing.
os.environ.update({"OLIVE_DISABLE_TELEMETRY": "1", "CI": "1"})

import numpy as np
import olive  # type: ignore[import-not-found]  # it has an environment of its own
import onnx
from olive.data.registry import Registry  # type: ignore[import-not-found]


class Samples:
    """Feeds with a label that is not used: the form of data that Olive's dataloader takes."""

    def __init__(self, path: str) -> None:
        with np.load(path) as data:
            self._inputs = {name: data[name] for name in data.files if name != "y"}

    def __len__(self) -> int:
        return len(next(iter(self._inputs.values())))

    def __getitem__(self, index: int) -> tuple[dict[str, Any], int]:
        return {name: array[index] for name, array in self._inputs.items()}, 0


@Registry.register_dataset()  # type: ignore[untyped-decorator]
def npz_samples(path: str, **_: Any) -> Samples:
    return Samples(path)


def quantize(source: Path, calibration: Path, target: Path, *, per_channel: bool, bits: int) -> None:
    data = {
        "name": "calibration",
        "load_dataset_config": {"type": "npz_samples", "params": {"path": str(calibration)}},
    }
    steps: dict[str, Any] = {"quantize": {"type": "OnnxStaticQuantization", "data_config": "calibration"}}
    if per_channel:
        steps["quantize"] |= {"per_channel": True, "precision": f"int{bits}"}
        if next(item.version for item in onnx.load(source).opset_import if not item.domain) < 13:
            # The first opset with a scale for each channel; without it the result is no valid model.
            steps = {"convert": {"type": "OnnxOpVersionConversion", "target_opset": 13}, **steps}
    with tempfile.TemporaryDirectory() as folder:
        result = olive.run(
            {
                "input_model": {"type": "ONNXModel", "model_path": str(source)},
                "data_configs": [data],
                "passes": steps,
                "cache_dir": f"{folder}/cache",
                "output_dir": f"{folder}/output",
            }
        )
        shutil.copyfile(result.get_best_candidate().model_path, target)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--per-channel", action="store_true")
    parser.add_argument("--bits", type=int, choices=(8, 4), default=8, help="of weights per channel")
    arguments = parser.parse_args()
    quantize(
        arguments.model,
        arguments.calibration,
        arguments.output,
        per_channel=arguments.per_channel,
        bits=arguments.bits,
    )


if __name__ == "__main__":
    main()
