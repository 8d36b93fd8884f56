"""The protocol's names of datatypes."""

from collections.abc import Mapping
from typing import Final

from edgekit_runtime.errors import RequestError

DTYPE_OF_DATATYPE: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    **{f"{sign}INT{bits}": f"{sign.lower()}int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
DATATYPE_OF_DTYPE: Final[Mapping[str, str]] = {dtype: name for name, dtype in DTYPE_OF_DATATYPE.items()}
_NOT_HERE: Final[Mapping[str, str]] = {
    "BF16": "numpy and the engines of this service have no bfloat16; send FP32",
    "BYTES": "no engine of this service takes strings",
}


def find_dtype(datatype: object, where: str) -> str:
    """Return the name of the numpy dtype of `datatype`.

    Raises:
        RequestError: it is none of the protocol's, or one that no model here can have.
    """
    dtype = DTYPE_OF_DATATYPE.get(datatype) if isinstance(datatype, str) else None
    if dtype is not None:
        return dtype
    if isinstance(datatype, str) and datatype in _NOT_HERE:
        raise RequestError(400, f"{where}: datatype {datatype} is not supported: {_NOT_HERE[datatype]}")
    known = ", ".join(DTYPE_OF_DATATYPE)
    raise RequestError(400, f"{where}: datatype is {str(datatype)[:40]!r}, expected one of {known}")
