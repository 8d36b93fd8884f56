"""Rewrites of onnxruntime's optimiser that change what a model computes, and are off in every session.

`Pad_Fusion` gives the zeros of a Pad to the MaxPool behind it, which pads with the smallest value instead:
where the inputs are negative, onnxruntime 1.31.1 answers otherwise than ONNX. Packaging folds the Pad before
a Conv where the model has no such MaxPool.
"""

from typing import Final

WRONG_REWRITES: Final = ("Pad_Fusion",)
"""By the names that `InferenceSession(disabled_optimizers=…)` takes."""
