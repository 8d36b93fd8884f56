"""Convert one ONNX model for ncnn with its own converter, pnnx: float32, a batch of one.

    python ncnn_convert.py MODEL.onnx CALIBRATION.npz OUTPUT.param

ncnn's tools for int8 come as source alone. The converter ends with 0 on operators that ncnn lacks, so its
outputs must be judged.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    with np.load(arguments.calibration) as data:
        shape = data[next(name for name in data.files if name != "y")].shape
    sizes = ",".join(map(str, (1, *shape[1:])))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "model.onnx")
        shutil.copy(arguments.model, source)
        command = [Path(sys.executable).with_name("pnnx"), source, f"inputshape=[{sizes}]", "fp16=0"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for suffix in (".param", ".bin"):
            shutil.copy(source.with_suffix(f".ncnn{suffix}"), arguments.output.with_suffix(suffix))


if __name__ == "__main__":
    main()
