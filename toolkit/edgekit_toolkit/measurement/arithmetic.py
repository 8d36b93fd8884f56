"""Describes how this machine computes 8-bit products, because scores depend on this.

All targets accumulate 8-bit products exactly in 32 bits. Arm and TensorRT have instructions for this. x86
uses VNNI, or else a setting of the runtime (`edgekit_runtime.sessions.ort_products`). This setting does not
cover a few operators of models that were quantized by other tools (`models.saturating_products`).
"""

import platform
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.sessions.ort_products import EXACT_SETTING, saturates
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.targets.spec import Target

# As Linux names them, the fastest for 8-bit products first.
_X86: Final = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512bw", "avx2", "sse4_1")
_GENERIC: Final = ("x86-64", "x86-64-avx2")
_ARM: Final = ("i8mm", "asimddp", "asimd")


def processor_features() -> list[str]:
    """Return the features of this processor from `/proc/cpuinfo`. Empty if that file is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").split()


def instruction_set() -> str:
    """Return Linux's name of this processor's best instruction set for 8-bit products, or `unknown`."""
    features = processor_features()
    return next((name for name in (*_X86, *_ARM) if name in features), "unknown")


def arithmetic_facts() -> dict[str, Any]:
    """Return `instruction_set` and `exact_products_by` of this machine, for evidence files and reports."""
    return {
        "instruction_set": instruction_set(),
        "exact_products_by": f"{EXACT_SETTING}=1" if saturates() else "instruction",
    }


def measures_here(target: Target) -> bool:
    """Return whether a latency that is measured on this machine holds for the target.

    The target must be a generic x86-64, and this machine must be an x86-64 too. Either both or neither must
    have VNNI, because int8 kernels take several times as long without it.
    """
    is_generic = target.name in _GENERIC and platform.machine() == "x86_64"
    return is_generic and target.quantization.reduce_range == saturates()


def score_label(model: Model) -> str:
    """Return `estimated` if sums of the model saturate here and not on the target, else `measured`."""
    return "estimated" if model.saturating_nodes() else "measured"
