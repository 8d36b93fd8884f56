"""The recipe of a package: everything that was decided, to make the same bytes again without a search.

A recipe is as trusted as the model: its score goes into the manifest as it stands, and who repeats a
recipe signs what it says. The model that it makes must have the digest that it states. The file also states
a digest of its own, which finds damage and accidental edits; it is no signature.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeVar

from edgekit_runtime import __version__
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import RecipeError
from edgekit_runtime.package.variants import MAX_VARIANTS
from edgekit_runtime.system.atomic_files import write_atomically
from edgekit_toolkit.quantize.forms import Form

RECIPE_FORMAT: Final = "https://edgekit.dev/recipe/v1"
MAX_RECIPE_BYTES: Final = 64 << 20
_MAX_INTEGER: Final = 2**31 - 1
_TOOLS: Final = ("numpy", "onnx", "onnxoptimizer", "onnxruntime")
_LITERT_TOOLS: Final = ("ai-edge-litert", "ai-edge-quantizer", "flatbuffers")
_BACKENDS: Final = ("litert", "ort", "tensorrt")  # what packages are made for here
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RecipeVariant:
    """What differs in a further variant of the package; attributes are those of `Recipe`."""

    name: str
    backend: str
    form: Form
    model_sha256: str
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What was decided for one package.

    Attributes:
        name, version, target: of the package.
        backend: engine that the target prefers.
        source_sha256: of the source model.
        batch: what the batch was fixed to, or None where it was left as it is.
        dims: sizes of free dimensions with which golden outputs were made.
        steps: optimisation passes that were applied, each with its form.
        form: of the weights and arithmetic.
        model_sha256: of the packaged model.
        golden_seed: of the golden inputs.
        golden_ranges: input name -> smallest and largest value.
        budget: limits.
        figures: of the manifest.
        labels: one a class, or None.
        preprocessing: the user's description, or None.
        tools: versions with which it was made.
        disabled_optimizers: rewrites of onnxruntime that are off for the model, as `ort_options` has them.
        variants: further ones; `backend`, `form`, `model_sha256` and `figures` above are the default's.
    """

    name: str
    version: str
    target: str
    backend: str
    source_sha256: str
    batch: int | None
    dims: Mapping[str, int]
    steps: tuple[tuple[str, int], ...]
    form: Form
    model_sha256: str
    golden_seed: int
    golden_ranges: Mapping[str, tuple[float, float]]
    budget: Mapping[str, float]
    figures: Mapping[str, Any]
    labels: str | None
    preprocessing: Mapping[str, Any] | None
    tools: Mapping[str, str]
    disabled_optimizers: tuple[str, ...] = ()
    variants: tuple[RecipeVariant, ...] = ()

    def of_variant(self, variant: RecipeVariant) -> "Recipe":
        """Return the recipe of a package with nothing but one of the further variants."""
        return replace(
            self,
            backend=variant.backend,
            form=variant.form,
            model_sha256=variant.model_sha256,
            figures=variant.figures,
            variants=(),
        )

    def to_bytes(self) -> bytes:
        """Return the recipe as canonical JSON; without variants or disabled rewrites it has no such field."""
        value = _to_json(self) | {"format": RECIPE_FORMAT}
        value["variants"] = [_to_json(variant) for variant in self.variants]
        return encode_json({name: item for name, item in value.items() if item or name not in _OPTIONAL})

    @property
    def sha256(self) -> str:
        """Digest of the recipe's canonical bytes."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def write(self, path: Path) -> None:
        """Write the recipe, indented, so that it can be read.

        Raises:
            OutputError: it cannot be written.
        """
        value = {**json.loads(self.to_bytes()), "sha256": self.sha256}
        text = json.dumps(value, indent=1, ensure_ascii=False)
        with write_atomically(path) as file:
            file.write(f"{text}\n".encode())


def tool_versions(*backends: str) -> dict[str, str]:
    """Versions of what decides about the bytes of a package for these backends."""
    names = (*_TOOLS, *(_LITERT_TOOLS if "litert" in backends else ()))
    found = {"edgekit": __version__}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):  # then no form of the model was made by it
            found[name] = metadata.version(name)
    return found


def read_recipe(path: Path) -> Recipe:
    """Return the recipe at `path`.

    Raises:
        RecipeError: unreadable, too large, malformed, or not as it was written; the message names the field.
    """
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise RecipeError(f"{path}: over the limit of {MAX_RECIPE_BYTES} bytes for a recipe")
        data = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}; check the path") from error
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: is not JSON: {error}; copy or make the recipe again") from error
    if not isinstance(value, dict) or value.get("format") != RECIPE_FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise RecipeError(f"{path}: format is {found!r}, expected {RECIPE_FORMAT!r}")
    try:
        _check_digest(value)
        members = {name: item for name, item in value.items() if name not in {"format", "sha256"}}
        return _read(Recipe, members)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:  # from encode_json
        raise RecipeError(f"{path}: holds what JSON in UTF-8 cannot: {error}") from error


def _check_digest(value: Mapping[str, Any]) -> None:
    rest = {name: item for name, item in value.items() if name != "sha256"}
    made = hashlib.sha256(encode_json(rest)).hexdigest()
    if value.get("sha256") != made:
        raise RecipeError(
            f"has sha256 {made}, it states {value.get('sha256')}: it was edited or damaged; fetch it again,"
            " or package the model again with other options"
        )


def _to_json(record: Recipe | RecipeVariant) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)} | {
        "form": record.form.to_json()
    }


def _read(kind: type[_T], value: Any, where: str = "") -> _T:
    """Return the record that a JSON object states; an optional field may be missing.

    Raises:
        RecipeError: a field is missing, malformed or not known.
    """
    left, found = dict(_object(value)), {}
    for name in [field.name for field in fields(kind)]:  # type: ignore[arg-type]  # both kinds are dataclasses
        if name in _OPTIONAL and name not in left:
            continue
        if name not in left:
            raise RecipeError(f"field '{where}{name}' is missing")
        try:
            found[name] = _READERS[name](left.pop(name))
        except KeyError as error:
            raise RecipeError(f"field '{where}{name}.{error.args[0]}' is missing") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise RecipeError(f"field '{where}{name}' is malformed: {error}") from error
    if left:
        raise RecipeError(f"field '{where}{min(left)}' is not known here; this recipe is of a newer edgekit")
    return kind(**found)


def _variants(value: Any) -> tuple[RecipeVariant, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_VARIANTS:
        raise ValueError(f"expected a list of 1 to {MAX_VARIANTS} variants")
    found = tuple(_read(RecipeVariant, item, f"variants[{index}].") for index, item in enumerate(value))
    names = [variant.name for variant in found]
    if len(set(names)) < len(names):
        raise ValueError(f"a name stands twice in {', '.join(names)}")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"is {value!r}, expected text")
    return value


def _backend(value: Any) -> str:
    if value not in _BACKENDS:
        raise ValueError(f"is {value!r}, expected one of {', '.join(_BACKENDS)}")
    return str(value)


def _integer(value: Any, least: int) -> int:
    if type(value) is not int or not least <= value <= _MAX_INTEGER:
        raise ValueError(f"is {value!r}, expected an integer from {least} to {_MAX_INTEGER}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"is {value!r}, expected a number")
    return float(value)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"is {value!r}, expected an object")
    return value


def _or_none(read: Callable[[Any], _T]) -> Callable[[Any], _T | None]:
    return lambda value: None if value is None else read(value)


_OPTIONAL: Final = frozenset({"variants", "disabled_optimizers"})
# How each field of a recipe, and of a variant in it, is read.
_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("name", "version", "target", "source_sha256", "model_sha256"), _text),
    "backend": _backend,
    "batch": _or_none(lambda batch: _integer(batch, 1)),
    "dims": lambda dims: {name: _integer(size, 1) for name, size in dims.items()},
    "steps": lambda steps: tuple((_text(name), _integer(form, 0)) for name, form in steps),
    "form": Form.from_json,
    "golden_seed": lambda seed: _integer(seed, 0),
    "golden_ranges": lambda ranges: {
        name: (_number(low), _number(high)) for name, (low, high) in ranges.items()
    },
    "budget": lambda budget: {name: _number(limit) for name, limit in budget.items()},
    "figures": _object,
    "labels": _or_none(_text),
    "preprocessing": _or_none(_object),
    "tools": lambda tools: {name: _text(version) for name, version in tools.items()},
    "disabled_optimizers": lambda names: tuple(_text(name) for name in names),
    "variants": _variants,
}
