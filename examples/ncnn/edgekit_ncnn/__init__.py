"""A backend for ncnn, as an example: a distribution of its own that offers a record by an entry point.

The artifact is the text of a `.param` file; the option `weights` names the artifact with the `.bin` file.
Files of ncnn state no dtypes and no batch, so inputs and outputs are those of the manifest, in its order.
"""

import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgekit_runtime.errors import BackendError, DataError, RefusedInputError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.sessions.options import read_options
from edgekit_runtime.system.engines import Engine, EngineMissingError, Installation, SettingsToTry
from edgekit_runtime.tensors import Array, TensorSpec


@dataclass(frozen=True, slots=True)
class NcnnOptions:
    """Options of ncnn in a manifest.

    Attributes:
        weights: the artifact with the weights.
        threads: threads of one inference. One by default: with more, ncnn's threads wait in a busy loop and
            slow down whatever else runs.
        half_precision: whether Arm processors compute in float16; the golden outputs must be made so, too.
    """

    weights: str
    threads: int | None = None
    half_precision: bool = False


class NcnnSession:
    """A model in ncnn that takes one sample at a time; see `edgekit_runtime.sessions.Session`."""

    is_concurrent = False
    has_fixed_work = False

    def __init__(self, param: bytes, weights: bytes, options: NcnnOptions, package: OpenedPackage) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when OpenMP starts
        try:
            import ncnn
        except (ImportError, OSError) as cause:
            raise EngineMissingError(f"backend 'ncnn': {cause}; {NCNN.installation.missing_text}") from cause
        self.inputs: tuple[TensorSpec, ...] = package.manifest.inputs
        self.outputs: tuple[TensorSpec, ...] = package.manifest.outputs
        for spec in (*self.inputs, *self.outputs):
            if spec.shape[:1] != (1,) or spec.size_bytes is None or spec.dtype != "float32":
                raise BackendError(
                    f"backend 'ncnn': '{spec.name}' is {spec.dtype} {list(spec.shape)}, expected float32 of"
                    " fixed sizes with a batch of 1; package with --batch 1"
                )
        self._lock, self._make_matrix = threading.Lock(), ncnn.Mat
        self._net: Any = ncnn.Net()
        settings = self._net.opt
        settings.num_threads, settings.use_vulkan_compute = options.threads or 1, False
        for name in ("fp16_packed", "fp16_storage", "fp16_arithmetic"):
            setattr(settings, f"use_{name}", options.half_precision)
        settings.use_bf16_storage = False
        with tempfile.TemporaryDirectory(prefix="edgekit-ncnn-") as folder:  # the binding reads files alone
            paths = Path(folder, "model.param"), Path(folder, "model.bin")
            paths[0].write_bytes(param)
            paths[1].write_bytes(weights)
            if self._net.load_param(str(paths[0])) or self._net.load_model(str(paths[1])):
                raise BackendError("backend 'ncnn': the engine refused the model; its reason is in the log")
        self._input_names, self._output_names = self._net.input_names(), self._net.output_names()
        if (len(self._input_names), len(self._output_names)) != (len(self.inputs), len(self.outputs)):
            raise BackendError(
                f"backend 'ncnn': the model has inputs {self._input_names} and outputs {self._output_names},"
                f" the manifest {len(self.inputs)} and {len(self.outputs)}"
            )

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run as `Session.run` says; the caller owns the arrays."""
        if inputs.keys() != {spec.name for spec in self.inputs}:
            raise DataError(f"got inputs {sorted(inputs)}, expected {[spec.name for spec in self.inputs]}")
        for spec in self.inputs:
            spec.check(inputs[spec.name])
        with self._lock:
            if self._net is None:
                raise BackendError("backend 'ncnn': the session is closed")
            samples = [np.ascontiguousarray(inputs[spec.name][0]) for spec in self.inputs]  # ncnn reads these
            extractor = self._net.create_extractor()
            for name, sample in zip(self._input_names, samples, strict=True):
                extractor.input(name, self._make_matrix(sample))
            return {
                spec.name: _extract(extractor, name, spec)
                for name, spec in zip(self._output_names, self.outputs, strict=True)
            }

    def close(self) -> None:
        """Free the model once a run under way has ended."""
        with self._lock:
            self._net = None


def _extract(extractor: Any, name: str, spec: TensorSpec) -> Array:
    code, matrix = extractor.extract(name)
    value = np.array(matrix, np.float32)
    if code or value.nbytes != spec.size_bytes:
        raise RefusedInputError(
            f"backend 'ncnn': '{spec.name}' is {list(value.shape)} with code {code},"
            f" expected {list(spec.shape)}"
        )
    return value.reshape([int(size) for size in spec.shape])


def _open(package: OpenedPackage, choice: BackendChoice, threads: int | None) -> NcnnSession:
    options = read_options(NcnnOptions, NCNN.name, choice.options, threads)
    return NcnnSession(
        bytes(package.read(choice.artifact)), bytes(package.read(options.weights)), options, package
    )


def _tuning_options(threads: Sequence[int]) -> SettingsToTry:
    return [{"threads": count} for count in threads]


NCNN = Engine(
    name="ncnn",
    title="ncnn",
    installation=Installation(
        modules=("ncnn",), distributions=("ncnn",), advice="install it by `pip install ncnn`"
    ),
    open=_open,
    tuning_options=_tuning_options,
)
