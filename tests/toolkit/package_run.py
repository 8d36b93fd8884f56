"""Runs `edgekit package` for the tests of it, and makes the small models and samples that it is run on."""

import contextlib
import functools
import io
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from edgekit_cli import progress
from edgekit_cli.cli import main
from edgekit_runtime.package.archive import OpenedPackage, read_package
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore

TINY = Path(__file__).parents[2] / "models" / "tiny"

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Outcome:
    """What one run of the command line left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """Standard output, which must be one JSON document and nothing else."""
        value = json.loads(self.stdout)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> dict[str, Any]:
        """The error object that `--json` prints."""
        error = self.json["error"]
        assert error["exit_code"] == self.code
        assert isinstance(error, dict)
        return error


def edgekit(*arguments: object) -> Outcome:
    """Run `edgekit ARGUMENTS` in this process; an error that edgekit does not explain is raised."""
    texts = [str(argument) for argument in arguments]
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["edgekit", *texts]),
        mock.patch.object(progress, "PLAIN_INTERVAL_S", math.inf),  # time decides no test
    ):
        code = main(texts)
    return Outcome(code, out.getvalue(), err.getvalue())


def check_refused(run: Callable[..., Outcome], code: int, message: str) -> None:
    """Both forms of a refusal: one line on stderr, and one JSON document on stdout."""
    plain = run()
    assert (plain.code, plain.stdout) == (code, "")
    assert re.fullmatch(rf"edgekit: .*{message}.*\n", plain.stderr), plain.stderr
    spoken = run("--json")
    assert spoken.code == code
    assert re.search(message, spoken.error["message"])


def package(model: Path, out: Path, *options: object, target: str = "x86-64") -> Outcome:
    """Run `edgekit package` with one thread and, unless options say otherwise, no search and one engine."""
    quick = () if "--search-seconds" in options else ("--search-seconds", "0")
    several = target in {"x86-64", "rpi5", "rpi4", "rpi-zero-2w"} and model.suffix != ".tflite"
    engine = ("--backend", "ort") if several and "--backend" not in options else ()
    return edgekit("package", model, "--target", target, "-o", out, "--threads", 1, *quick, *engine, *options)


_PARTS = tempfile.TemporaryDirectory(prefix="edgekit-tests-")


@functools.cache
def tiny(
    name: str, *, calibration_samples: int = 64, evaluation_samples: int = 200
) -> tuple[Path, tuple[object, ...]]:
    """A model of `models/tiny`, and the options that give its first samples."""
    calibration = _store_part(f"{name}.calib.npz", calibration_samples)
    evaluation = _store_part(f"{name}.eval.npz", evaluation_samples)
    return TINY / f"{name}.onnx", ("--calibration", calibration, "--eval", evaluation)


def _store_part(file_name: str, count: int) -> Path:
    with np.load(str(TINY / file_name)) as arrays:
        part = {key: values[:count] for key, values in arrays.items()}
    return stored(Path(_PARTS.name, f"{count}-{file_name}"), part)


def read_only(folder: Path) -> OpenedPackage:
    """The one package in a folder, verified with the keys of `EDGEKIT_HOME`."""
    (path,) = folder.glob("*.edgepkg")
    return read_package(path, TrustStore.from_folder(find_keys_folder()))


def tensor(name: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model_of(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    weights: Arrays | None = None,
    *,
    opset: int = 17,
) -> onnx.ModelProto:
    constants = [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()]
    graph = helper.make_graph(nodes, "model", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def mlp(batch: int | str = "N", *, wide: int = 32, x: str = "x", y: str = "y") -> onnx.ModelProto:
    """y [batch, 4] = relu(x [batch, 8] @ a + b) @ c."""
    draw = np.random.default_rng(0)
    weights = {
        "a": draw.standard_normal((8, wide)).astype(np.float32),
        "b": draw.standard_normal(wide).astype(np.float32),
        "c": draw.standard_normal((wide, 4)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Gemm", [x, "a", "b"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "c"], [y]),
    ]
    return model_of(nodes, [tensor(x, [batch, 8])], [tensor(y, [batch, 4])], weights)


def saved(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def samples(count: int, seed: int, **extra: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Samples for `mlp`: x float32 [count, 8]."""
    x = np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)
    return {"x": x, **extra}


def stored(path: Path, arrays: Arrays) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]  # its stub takes the names for its own options
    return path


def listing(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too, with its content; empty where there is no folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@contextlib.contextmanager
def isolated_home(folder: Path) -> Iterator[None]:
    """Keys go into `folder`, and the terminal has 80 columns."""
    with mock.patch.dict(os.environ, {"EDGEKIT_HOME": str(folder), "COLUMNS": "80"}):
        yield


def without_progress(stderr: bytes) -> bytes:
    """What a process printed beside its progress, of which a slow machine prints more."""
    return re.sub(rb"^ *\d+ s  .*\n", b"", stderr, flags=re.MULTILINE)


def environment() -> dict[str, str]:
    """Of a process that imports edgekit from here."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path}
