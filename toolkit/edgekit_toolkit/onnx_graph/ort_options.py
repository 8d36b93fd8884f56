"""Options of onnxruntime that are stored in a model's metadata, for this machine and for devices.

For example, if an optimisation of onnxruntime changes the results of a model, the metadata disables this
optimisation. All forms that are made from the model inherit the setting.
"""

from collections.abc import Sequence
from typing import Final

import onnx

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.sessions.options import read_options
from edgekit_runtime.sessions.ort import OrtOptions
from edgekit_toolkit.onnx_graph.index import copy_model, set_items
from edgekit_toolkit.onnx_graph.traversal import has_foldable_weights

WHOLE_OPTIMISER: Final = ("*",)
"""Stands for the names of all optimizers. The model then runs without any optimisation."""
_NOTES: Final = "edgekit."
DISABLED_OPTIMIZERS_KEY: Final = f"{_NOTES}disabled_optimizers"
"""The key in the model's metadata whose value is a comma-separated list of optimizers."""
_NARROW_WEIGHTS_KEY: Final = f"{_NOTES}narrow_weights"


def notes_of(model: onnx.ModelProto) -> list[onnx.StringStringEntryProto]:
    """Return the metadata entries that store options of onnxruntime."""
    return [entry for entry in model.metadata_props if entry.key.startswith(_NOTES)]


def disabled_optimizers(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the names of the disabled onnxruntime optimisations, or `WHOLE_OPTIMISER` for all of them."""
    noted = [entry.value for entry in model.metadata_props if entry.key == DISABLED_OPTIMIZERS_KEY]
    return tuple(name for value in noted for name in value.split(",") if name)


def disable_optimizers(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return a copy of `model` that disables exactly these optimisations of onnxruntime."""
    return _with_note(model, DISABLED_OPTIMIZERS_KEY, ",".join(names))


def note_narrow_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` whose metadata says that its 8-bit weights use only 7 bits."""
    return _with_note(model, _NARROW_WEIGHTS_KEY, "yes")


def _with_note(model: onnx.ModelProto, key: str, value: str) -> onnx.ModelProto:
    result = copy_model(model)
    set_items(result.metadata_props, (entry for entry in model.metadata_props if entry.key != key))
    if value:
        result.metadata_props.add(key=key, value=value)
    return result


def stated_options(model: onnx.ModelProto) -> dict[str, JsonValue]:
    """Return the backend options for the manifest. These are the options that differ from the defaults.

    Defaults are left out because older runtimes refuse packages with options that they do not know.
    """
    options: dict[str, JsonValue] = {"fold_weights": True} if has_foldable_weights(model) else {}
    if any(entry.key == _NARROW_WEIGHTS_KEY for entry in model.metadata_props):
        options["narrow_weights"] = True
    disabled = disabled_optimizers(model)
    if disabled == WHOLE_OPTIMISER:
        return {**options, "optimise": False}
    return {**options, "disabled_optimizers": list(disabled)} if disabled else options


def ort_options(model: onnx.ModelProto) -> OrtOptions:
    """Return all backend options of the model, including defaults."""
    return read_options(OrtOptions, "ort", stated_options(model))
