"""The profile of a model on a machine: times of its fused kernels, sizes of its tensors.

It is a file of JSON. It says nothing about other machines or links: `planning_graph` joins the profiles of
two machines, and the planner adds the link.
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
"""Text of every message about a model that cannot be split; the planner and the user recognise it."""

Label: TypeAlias = Literal["measured", "emulated"]
_Seconds: TypeAlias = Annotated[float, Range(0, 86400)]
_Share: TypeAlias = Annotated[float, Range(0, 1e9)]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel that the engine runs, after fusion.

    Attributes:
        name, op: name and operator of the node in the optimised graph.
        reads, writes: names of the activations that it reads and writes. Some exist only in the optimised
            graph, not in the model.
        seconds: its time in a run; the times of all kernels sum up to the whole run.
        spread: distance between the quartiles of its runs, as a share of their median.
        weights_bytes: size of the weights that it reads, in the engine's form.
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
    """Times and sizes of a model on one machine.

    Attributes:
        model_sha256: digest of the file that was run.
        measured_on: the machine as the user named it, such as `local@20%` or `ssh:kitchen`.
        machine: facts about that machine, and its state during the measurement.
        label: `emulated` if the machine was slowed down to stand for another.
        whole_s, whole_spread: time of a run of the whole model without profiling; distance between the
            quartiles of these runs, as a share of their median.
        scale: factor for the kernels' times, after `overhead_s` was subtracted, so that they sum up to
            `whole_s`. If it is far below 1, profiling disturbed the run. If it is above 1, the run takes time
            beside its kernels. 0 without kernels.
        inputs, outputs: names of the model's tensors.
        tensors: name -> size in bytes, of inputs and of tensors that kernels write, at the run's shapes.
        unsendable: tensors that cannot be sent: their size depends on the data, or they are no plain tensors.
        kernels: kernels, in the order in which they ran; empty if only whole runs could be measured.
        obstacle: why there are no kernels, or why the model cannot be split; empty if it can.
        overhead_s: time that profiling added to each kernel; see `find_overhead`.
        request: time that a request to a server costs this machine, without the model itself.
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
        """The machine in a few words, such as `Cortex-A76, 4 cores`, with the GPU that ran the model."""
        cores = f"{self.machine.cores} core{'s' * (self.machine.cores != 1)}"
        quota = "" if self.machine.quota is None else f", {self.machine.quota:.0%} of one core"
        gpu = f"{self.machine.gpu}, " if self.machine.gpu else ""
        return f"{gpu}{self.machine.cpu}, {cores}{quota}{' (emulated)' * (self.label == 'emulated')}"


def describe_cause(cause: Exception) -> str:
    """Return an error's text without its full stop. An error that is not edgekit's has its class in front."""
    text = " ".join(str(cause).split()).rstrip(".")
    return text if isinstance(cause, EdgekitError) else f"{type(cause).__name__}: {text}"


def digest_model(content: bytes) -> str:
    """Return the digest by which a profile identifies its model: SHA-256 in hexadecimal digits.

    External data are not part of it: the graph names them, and hashing gigabytes would take longer than the
    measurement.
    """
    return hashlib.sha256(content).hexdigest()


def write_profile(path: Path, profile: ModelProfile) -> None:
    """Write a profile as JSON.

    Raises:
        OutputError: the file cannot be written.
    """
    write_text_atomically(path, json.dumps(to_plain(profile), indent=1) + "\n")


def read_profile(path: Path) -> ModelProfile:
    """Return the profile in a file.

    Raises:
        CutError: the file is missing or is no profile.
    """
    try:
        data = path.read_bytes()
    except OSError as cause:
        raise CutError(f"{path}: {cause.strerror}; measure one by `edgekit offload profile`") from cause
    return from_json(ModelProfile, data, str(path), CutError, hint="measure it by `edgekit offload profile`")
