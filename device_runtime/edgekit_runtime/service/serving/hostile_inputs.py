"""Models with which a client can end or occupy the process that runs them.

**Integer division** by values of inputs: x86 processors raise a signal (SIGFPE) where the smallest integer is
divided by -1, and onnxruntime does not look for it; Arm and RISC-V processors return a value. The toolkit
records whether a model may do that. A package without the record is searched for the operators.

**Loops** in an engine that has no way to end a run. The process is ended instead.
"""

import platform
import re
from collections.abc import Callable, Iterable
from typing import Final

from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.figures import INTEGER_DIVISION_FIGURE
from edgekit_runtime.package.fixed_work import has_loop
from edgekit_runtime.package.variants import Variant
from edgekit_runtime.system.engines import Engine, get_engine

_TRAPPING_MACHINES: Final = frozenset({"x86_64", "amd64", "i386", "i486", "i586", "i686"})
# The operator of a node in an ONNX file: field 4 of NodeProto, three bytes long.
_OPERATORS: Final = re.compile(rb"\x22\x03(?:Div|Mod)")


def find_isolation_reason(package: OpenedPackage) -> str | None:
    """Return why a model should run in a process of its own, after its name; or None."""
    if can_trap(package):
        return "divides integers by values of its inputs, which can end the process that does it"
    endless = _list_models(package.manifest.all_variants, lambda engine: not engine.can_stop_runs)
    if any(has_loop(package.read(model)) for model in endless):
        return "has a loop, in which its engine cannot be stopped"
    return None


def can_trap(package: OpenedPackage, machine: str | None = None) -> bool:
    """Return whether inputs of the model in `package` may end the process that runs it.

    Args:
        package: verified.
        machine: architecture as `platform.machine` names it, by default of this machine.
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
    """Return the artifacts that an engine opens to which a rule applies."""
    choices = [choice for variant in variants for choice in variant.backend.chain]
    engines = [(choice.artifact, get_engine(choice.name)) for choice in choices]
    return {artifact for artifact, engine in engines if engine is not None and applies(engine)}
