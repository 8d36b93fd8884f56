"""Converts a model, runs the file in LiteRT, and compares the outputs with those of onnxruntime."""

from collections.abc import Mapping, Sequence
from typing import Final

import onnx

from edgekit_runtime.errors import BackendError, DataError
from edgekit_toolkit.onnx_graph.ort_options import ort_options
from edgekit_toolkit.openings.sessions import open_litert, open_ort
from edgekit_toolkit.passes.parity import Tolerance, compare, worst
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.tflite.convert import convert
from edgekit_toolkit.tflite.refusal import ConversionError

# Both engines compute in float32 and add in different orders. A wrong axis or weight moves outputs far more.
EQUAL: Final = Tolerance(range_fraction=1e-4)


def convert_checked(model: onnx.ModelProto, dims: Mapping[str, int], feeds: Sequence[Feeds]) -> bytes:
    """Convert a model, check the result on inputs, and return the TFLite file.

    Args:
        model: The model, as for `convert`.
        dims: The size of each free dimension of the inputs, by name.
        feeds: At least one set of inputs for the comparison. The inputs must have the sizes in `dims`.

    Raises:
        ConversionError: Nodes are not supported, LiteRT cannot load or run the file, or an output is not
            finite, has another dtype or shape, or differs by more than 1e-4 of its range.
        DataError: There are no feeds, or they do not fit the model.
        BackendError: The source model does not run on the feeds.
    """
    if not feeds:
        raise DataError("there are no feeds to compare the TFLite model's outputs on; give at least one")
    reference = open_ort(model.SerializeToString(), ort_options(model))
    expected = [reference.run(feed) for feed in feeds]
    content = convert(model, dims)
    pairs = zip(expected, _run(content, feeds), strict=True)
    parity = worst([compare(want, _in_order(output, want), EQUAL) for want, output in pairs])
    if not parity.ok:
        raise ConversionError(
            f"the TFLite model does not compute what onnxruntime does: {parity.reason}; nothing was written."
            " Package it for onnxruntime (--backend ort), and report this with the model"
        )
    return content


def _in_order(outputs: Feeds, expected: Feeds) -> Feeds:
    """Return the outputs in the order of the expected ones; LiteRT lists the names of a signature sorted."""
    if outputs.keys() != expected.keys():
        return outputs
    return {name: outputs[name] for name in expected}


def _run(content: bytes, feeds: Sequence[Feeds]) -> list[Feeds]:
    try:
        session = open_litert(content)
        return [session.run(feed) for feed in feeds]
    except BackendError as cause:
        raise ConversionError(
            f"LiteRT does not run the TFLite model that was made: {cause}; nothing was written. Package it"
            " for onnxruntime (--backend ort), and report this with the model"
        ) from cause
