"""The profile of a model on a machine: the times of its fused kernels and the sizes of its tensors.

A profile is a JSON file about one machine. `planning_graph` joins the profiles of two machines, and the
planner adds the network link.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from edgekit_runtime.dataclass_json import Range, from_json, to_plain
from edgekit_runtime.errors import CutError, EdgekitError
from edgekit_runtime.offload.measurement.machine_facts import MachineFacts
from edgekit_runtime.offload.measurement.request_cost import RequestCost
from edgekit_runtime.system.atomic_files import write_text_atomically

WHOLE_MODEL_ONLY: Final = "whole-model candidates only"
"""The end of every message about a model that cannot be split."""

Label: TypeAlias = Literal["measured", "emulated"]
_Seconds: TypeAlias = Annotated[float, Range(0, 86400)]
_Share: TypeAlias = Annotated[float, Range(0, 1e9)]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel that the engine runs after fusion.

    Attributes:
        name, op: The name and operator type of the node in the optimised graph.
        reads, writes: The names of the activations that the kernel reads and writes. Some of them exist only
            in the optimised graph.
        seconds: The time of the kernel in a run. The times of all kernels sum up to the time of the run.
        spread: The interquartile range of the kernel's times, divided by their median.
        weights_bytes: The size of the weights that the kernel reads, in the engine's format.
    """

    name: str
    op: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    seconds: _Seconds
    spread: _Share = 0.0
    weights_bytes: Annotated[int, Range(0, 1 << 50)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The times and sizes of a model on one machine.

    Attributes:
        model_sha256: The SHA-256 of the model file.
        measured_on: The machine as the user named it, such as `local@20%` or `ssh:kitchen`.
        machine: Facts about the machine, and its state during the measurement.
        label: How the times were obtained. `emulated` means that the machine was slowed down.
        whole_s, whole_spread: The time of a run of the whole model without profiling, and its spread (see
            `KernelTime`).
        scale: The factor by which the kernels' times were multiplied so that their sum is `whole_s` (see
            `find_overhead`). If it is far below 1, profiling disturbed the run. If it is above 1, the run
            spends time outside of its kernels. It is 0 if there are no kernels.
        inputs, outputs: The names of the model's inputs and outputs.
        tensors: The sizes in bytes of the inputs and of all tensors that kernels write, by name.
        unsendable: Tensors that cannot be sent, since their size depends on the data or they are not plain
            tensors.
        kernels: The kernels, in execution order. Empty if only whole runs could be measured.
        obstacle: Why there are no kernels, or why the model cannot be split. Empty if it can be split.
        overhead_s: The time that profiling added to each kernel (see `find_overhead`).
        request: The time that this machine spends on a request to a server, without the model.
    """

    model: str
    model_sha256: str
    measured_on: str
    machine: MachineFacts
    label: Label
    whole_s: _Seconds
    whole_spread: _Share
    scale: _Share
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: Mapping[str, Annotated[int, Range(0, 1 << 50)]]
    kernels: tuple[KernelTime, ...] = ()
    unsendable: tuple[str, ...] = ()
    obstacle: str = ""
    overhead_s: _Seconds = 0.0
    request: RequestCost = field(default_factory=RequestCost)

    @property
    def description(self) -> str:
        """A short description of the machine and of the GPU that ran the model, if any."""
        cores = f"{self.machine.cores} core{'s' * (self.machine.cores != 1)}"
        quota = "" if self.machine.quota is None else f", {self.machine.quota:.0%} of one core"
        gpu = f"{self.machine.gpu}, " if self.machine.gpu else ""
        return f"{gpu}{self.machine.cpu}, {cores}{quota}{' (emulated)' * (self.label == 'emulated')}"


def describe_cause(cause: Exception) -> str:
    """Return the message of an error without its final full stop.

    The class name is put in front, unless the error is an `EdgekitError`.
    """
    text = " ".join(str(cause).split()).rstrip(".")
    return text if isinstance(cause, EdgekitError) else f"{type(cause).__name__}: {text}"


def digest_model(content: bytes) -> str:
    """Return the SHA-256 of a model file in hexadecimal digits, which identifies the model of a profile.

    External data files are not included, since hashing gigabytes would take longer than the measurement.
    """
    return hashlib.sha256(content).hexdigest()


def write_profile(path: Path, profile: ModelProfile) -> None:
    """Write a profile to a JSON file.

    Raises:
        OutputError: The file cannot be written.
    """
    write_text_atomically(path, json.dumps(to_plain(profile), indent=1) + "\n")


def read_profile(path: Path) -> ModelProfile:
    """Read a profile from a JSON file.

    Raises:
        CutError: The file is missing or is not a profile.
    """
    try:
        data = path.read_bytes()
    except OSError as cause:
        raise CutError(f"{path}: {cause.strerror}; measure one by `edgekit offload profile`") from cause
    return from_json(ModelProfile, data, str(path), CutError, hint="measure it by `edgekit offload profile`")
