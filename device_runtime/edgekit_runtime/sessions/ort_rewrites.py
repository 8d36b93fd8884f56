"""Rewrites of onnxruntime's optimiser that change a model's results, and are off in every session.

`Pad_Fusion` moves the zeros of a Pad into the MaxPool behind it, which pads with the smallest value instead:
for negative inputs, onnxruntime 1.31.1 gives other results than ONNX. Packaging folds the Pad before a Conv
if the model has no such MaxPool.
"""

from typing import Final

WRONG_REWRITES: Final = ("Pad_Fusion",)
"""Names for `InferenceSession(disabled_optimizers=…)`."""
