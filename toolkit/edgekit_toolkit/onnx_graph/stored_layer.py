"""How one layer is stored, in any kind of model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One layer with weights: how a form's model stores and computes it.

    Attributes:
        precision: int8, int8 weights, int4 weights, fp16 weights, fp32, or dynamic int8.
        weight_bytes: size of its constants in the file, scales included.
    """

    precision: str
    weight_bytes: int
