"""Models whose engine a client can end together with its process: they divide integers by values of inputs.

x86 processors raise a signal (SIGFPE) where the smallest integer is divided by -1, and onnxruntime does not
look for it; Arm and RISC-V processors return a value. The toolkit records whether a model may do that. A
package without the record is searched for the operators.
"""

import platform
import re
from typing import Final

from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.figures import INTEGER_DIVISION_FIGURE
from edgekit_runtime.package.variants import Variant

_TRAPPING_MACHINES: Final = frozenset({"x86_64", "amd64", "i386", "i486", "i586", "i686"})
# The operator of a node in an ONNX file: field 4 of NodeProto, three bytes long.
_OPERATORS: Final = re.compile(rb"\x22\x03(?:Div|Mod)")


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
    models = {choice.artifact for choice in variant.backend.chain if choice.name == "ort"}
    return any(_OPERATORS.search(package.read(model)) is not None for model in models)
