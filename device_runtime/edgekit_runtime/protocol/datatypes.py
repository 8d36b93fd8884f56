"""The datatype names of the protocol, without BF16, which numpy lacks, and BYTES, which no model takes."""

from collections.abc import Mapping
from typing import Final

DTYPE_OF_DATATYPE: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    **{f"{sign}INT{bits}": f"{sign.lower()}int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
DATATYPE_OF_DTYPE: Final[Mapping[str, str]] = {dtype: name for name, dtype in DTYPE_OF_DATATYPE.items()}
