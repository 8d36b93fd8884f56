"""Finds models whose inputs could crash or block the process that runs them.

- **Integer division** by input values: on x86, the division of the smallest integer by minus one raises
  SIGFPE, and onnxruntime does not check for it. Arm and RISC-V processors return a value. The toolkit records
  whether inputs can cause this. In packages without this record, the runtime searches for integer divisions.
- **Positions and sizes** in inputs that some releases of an engine do not check (`_UNCHECKED`).
- **Unlimited sizes**: an input of 8 bytes can make `ConstantOfShape` use all memory.
- **Loops** in engines that cannot stop a run, and loops whose number of iterations comes from an input.
  Tensors may grow in each iteration, and onnxruntime cannot stop a loop with an empty body.
"""

import platform
import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.figures import INTEGER_DIVISION_FIGURE
from edgekit_runtime.package.fixed_work import LOOPS, has_endless_loop, has_free_sizes, read_graph
from edgekit_runtime.package.model_encodings import DAMAGED
from edgekit_runtime.package.variants import Variant
from edgekit_runtime.service.scheduling.run_memory import allowed_run_bytes
from edgekit_runtime.system.engines import Engine, get_engine

_TRAPPING_MACHINES: Final = frozenset({"x86_64", "amd64", "i386", "i486", "i586", "i686"})
# The operator of a node in an ONNX file: field 4 of NodeProto, three bytes long.
_OPERATORS: Final = re.compile(rb"\x22\x03(?:Div|Mod)")
_FORMATS: Final = frozenset({"onnx", "tflite"})
_WORKER_BYTES: Final = 1 << 30  # as RLIMIT_DATA counts, of a worker before it opens a model
_SESSION_FACTOR: Final = 3  # memory of a session over the size of its file: the file, weights, packed weights
# By operator, the word that one of its attributes must have (empty: none). Some values of its inputs after
# the first ended the process, or kept it busy for ever, in onnxruntime 1.24.4 or 1.31.1, or LiteRT 2.3.
_UNCHECKED: Final = {
    "GridSample": b"reflection",
    "Pad": b"reflect",
    **dict.fromkeys(("MaxUnpool", "Col2Im", "Trilu", "STFT", "RoiAlign", "REVERSE_SEQUENCE"), b""),
}


class Hazard(NamedTuple):
    """A way in which client inputs can harm the process that runs a model.

    Attributes:
        reason: A phrase that follows the name of the model, such as `has a loop, in which ...`.
        max_data_bytes: The memory limit for the process, or None if the model uses limited memory.
    """

    reason: str
    max_data_bytes: int | None = None


def find_hazard(package: OpenedPackage, sessions: int = 1) -> Hazard | None:
    """Return the hazard that requires a model to run in its own process, or None.

    `sessions` is the number of sessions per model in that process, which affects the memory limit.
    """
    members = package.list_members()
    if not members:
        return _find_hazard(package, sessions)
    hazards = {name: _find_hazard(member, sessions) for name, member in members.items()}
    present = {name: hazard for name, hazard in hazards.items() if hazard is not None}
    if not present:
        return None
    name, first = next(iter(present.items()))
    limits = [hazard.max_data_bytes for hazard in present.values() if hazard.max_data_bytes]
    own_bytes = (
        _SESSION_FACTOR * sessions * sum(artifact.size_bytes for artifact in package.manifest.artifacts)
    )
    return Hazard(f"in its stage '{name}' {first.reason}", sum(limits) + own_bytes if limits else None)


def _find_hazard(package: OpenedPackage, sessions: int) -> Hazard | None:
    reasons = []
    limit = None
    if can_trap(package):
        reasons.append("divides integers by values of its inputs, which can end the process that does it")
    endless = _list_models(package.manifest.all_variants, lambda engine: not engine.can_stop_runs)
    readable = _list_models(package.manifest.all_variants, lambda engine: engine.file_format in _FORMATS)
    for model in sorted(readable | endless):
        content = package.read(model)
        against, takes_memory = _examine(content, can_stop=model not in endless)
        reasons += against
        if takes_memory:
            own_bytes = _WORKER_BYTES + _SESSION_FACTOR * sessions * len(content)
            limit = max(limit or 0, own_bytes + allowed_run_bytes(None, None))
    return Hazard(reasons[0], limit) if reasons else None


def _examine(content: memoryview, *, can_stop: bool) -> tuple[list[str], bool]:
    """Return the reasons against a model file, and whether the memory of a run has no limit."""
    try:
        graph = read_graph(content)
        is_endless = has_endless_loop(graph)
    except DAMAGED:
        return ["cannot be read, so a run may have no end or take any memory"], True
    reasons = []
    operations = list(graph.follow_values())
    has_loop = any(
        operation.name in LOOPS or (operation.name and operation.bodies) for operation, _ in operations
    )
    if has_loop and not can_stop:
        reasons.append("has a loop, in which its engine cannot be stopped")
    for operation, positions in operations:
        word = _UNCHECKED.get(operation.name)
        is_unchecked = word is not None and (not word or word in operation.words)
        if is_unchecked and any(position > 0 for position in positions):
            name = operation.name
            reasons.append(f"takes positions for {name} from its inputs, which engines do not check")
    takes_sizes = has_free_sizes(graph)
    if is_endless:
        reasons.append("runs a loop as often as values of its inputs say, so a run may take any memory")
    elif takes_sizes:
        reasons.append("takes sizes of tensors from values of its inputs, so a run may take any memory")
    return reasons, is_endless or takes_sizes


def can_trap(package: OpenedPackage, machine: str | None = None) -> bool:
    """Return True if inputs could crash the process with an integer division.

    `machine` is the processor type in the form of `platform.machine`, by default that of this machine. The
    result is False unless it is x86.
    """
    if (machine or platform.machine()).lower() not in _TRAPPING_MACHINES:
        return False
    return any(_divides(package, variant) for variant in package.manifest.all_variants)


def _divides(package: OpenedPackage, variant: Variant) -> bool:
    stated = variant.figures.get(INTEGER_DIVISION_FIGURE)
    if isinstance(stated, bool):
        return stated
    models = _list_models([variant], lambda engine: engine.file_format == "onnx" and not engine.on_gpu)
    return any(_OPERATORS.search(package.read(model)) is not None for model in models)


def _list_models(variants: Iterable[Variant], applies: Callable[[Engine], bool]) -> set[str]:
    """Return the artifacts that are opened by an engine for which `applies` is True."""
    choices = [choice for variant in variants for choice in variant.backend.chain]
    engines = [(choice.artifact, get_engine(choice.name)) for choice in choices]
    return {artifact for artifact, engine in engines if engine is not None and applies(engine)}
