"""Makes 8-bit products exact in onnxruntime on every x86 processor.

Without VNNI, onnxruntime adds two products of uint8 and int8 values in 16 bits. The sum can reach 255 * 127 *
2 = 64,770, but it saturates at 32,767. The setting `session.x64quantprecision` selects slower kernels that
add in 32 bits. The setting also slows down processors with VNNI, so it is used only where sums saturate. It
affects only constant weights, and requires the graph optimization level `ORT_ENABLE_EXTENDED` or higher.

Source: docs/adr/0018-exact-products.md; onnxruntime, `kOrtSessionOptionsAvx2PrecisionMode`.
"""

import functools
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import onnxruntime

EXACT_SETTING: Final = "session.x64quantprecision"
LOG_FATAL_ONLY: Final = 4  # errors are also raised
_LOG_WARNINGS: Final = 2  # onnxruntime's default
X86: Final = frozenset({"x86_64", "AMD64", "i386", "i686"})
# A model with the one node MatMulInteger(a: uint8 [1, 2], b: int8 [2, 1]) -> c: int32 [1, 1], opset 10. It is
# stored here because a device has no onnx.
PROBE: Final = bytes.fromhex(
    "08053a5c0a180a01610a0162120163220d4d61744d756c496e74656765721201705a130a0161120e0a0c080212080a02"
    "08010a0208025a130a0162120e0a0c080312080a0208020a02080162130a0163120e0a0c080612080a0208010a020801"
    "42040a00100a"
)


@functools.cache
def saturates() -> bool:
    """Return whether sums of products of uint8 and int8 saturate in onnxruntime on this processor.

    The first call runs a small model to find out, which takes about 1 ms.

    Raises:
        ImportError: onnxruntime is not installed.
    """
    if platform.machine() not in X86:
        return False
    import numpy
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        PROBE, settings, providers=["CPUExecutionProvider"], enable_fallback=0
    )
    left, right = numpy.full((1, 2), 255, numpy.uint8), numpy.full((2, 1), 127, numpy.int8)
    return int(session.run(None, {"a": left, "b": right})[0][0, 0]) != 2 * 255 * 127


def open_exact(
    settings: "onnxruntime.SessionOptions",
    create: Callable[["onnxruntime.SessionOptions"], "onnxruntime.InferenceSession"],
    *,
    is_narrow: bool = False,
) -> "onnxruntime.InferenceSession":
    """Return the session from `create(settings)`, with exact 8-bit products on this processor.

    Args:
        settings: The session options. They are changed in place if sums would saturate.
        create: Creates a session. It is called again with other settings if the first call fails.
        is_narrow: Whether the quantized weights have only 7 bits, so that no sum can saturate.

    Raises:
        Exception: `create` failed.
    """
    if is_narrow or not saturates():
        return create(settings)
    level = settings.graph_optimization_level
    settings.add_session_config_entry(EXACT_SETTING, "1")
    try:
        return create(settings)
    except Exception:  # its exceptions have no other common base; the second try raises too
        # The engine cannot change a weight or a zero point that several nodes read, nor a QLinearConv of int8
        # by int8. At the basic level it leaves the QDQ form in float, which is exact and as slow as float.
        import onnxruntime

        onnxruntime.set_default_logger_severity(LOG_FATAL_ONLY)  # it warns of an entry that changes
        settings.add_session_config_entry(EXACT_SETTING, "0")
        onnxruntime.set_default_logger_severity(_LOG_WARNINGS)  # it is that of the whole process
        basic = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        settings.graph_optimization_level = min(level, basic, key=int)
        return create(settings)
