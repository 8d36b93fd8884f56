"""The arithmetic of this machine's 8-bit products, which decides whether scores hold for the target.

All targets add 8-bit products exactly, in 32 bits: Arm and TensorRT by their instructions, x86 by VNNI or by
the setting that the runtime uses without it (`edgekit_runtime.sessions.ort_products`). This machine does so
too, but for a few products of models that were quantized elsewhere (`models.saturating_products`).
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
    """Return the features of this processor, as `/proc/cpuinfo` names them; empty without that file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").split()


def instruction_set() -> str:
    """Return Linux's name of this processor's best instructions for 8-bit products, or `unknown`."""
    features = processor_features()
    return next((name for name in (*_X86, *_ARM) if name in features), "unknown")


def arithmetic_facts() -> dict[str, Any]:
    """Return `instruction_set` and `exact_products_by` of this machine, for evidence files and reports."""
    return {
        "instruction_set": instruction_set(),
        "exact_products_by": f"{EXACT_SETTING}=1" if saturates() else "instruction",
    }


def measures_here(target: Target) -> bool:
    """Whether latency measured here holds for the target.

    The target must be a generic x86-64, and both processors must have VNNI or both lack it: without VNNI,
    int8 kernels take several times as long.
    """
    is_generic = target.name in _GENERIC and platform.machine() == "x86_64"
    return is_generic and target.quantization.reduce_range == saturates()


def score_label(model: Model) -> str:
    """Return `estimated` if sums of the model saturate here and not on the target, otherwise `measured`."""
    return "estimated" if model.saturating_nodes() else "measured"
