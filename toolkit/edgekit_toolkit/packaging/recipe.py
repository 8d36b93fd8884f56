"""The recipe of a package: all decisions, from which the same package can be built again without a search.

Use only recipes from trusted sources. The figures of a recipe are copied to the manifest, which is then
signed. The recipe contains the digest of the model, which is checked when the model is built again. The file
also contains its own digest, which detects accidental changes but is not a signature.
"""

import contextlib
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final

from edgekit_runtime import __version__
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import Range, from_plain
from edgekit_runtime.errors import RecipeError
from edgekit_runtime.package.golden import MAX_SEED
from edgekit_runtime.package.variants import MAX_VARIANTS
from edgekit_runtime.system.atomic_files import write_text_atomically
from edgekit_toolkit.engines.record import find_support, list_supported
from edgekit_toolkit.quantize.forms import Form

RECIPE_FORMAT: Final = "https://edgekit.dev/recipe/v1"
MAX_RECIPE_BYTES: Final = 64 << 20
_MAX_INTEGER: Final = 2**31 - 1
_TOOLS: Final = ("numpy", "onnx", "onnxoptimizer", "onnxruntime")
_COUNT: Final = Range(1, _MAX_INTEGER)
_Number = Annotated[float, Range(-math.inf, math.inf)]
_OPTIONAL: Final = frozenset(
    {"variants", "disabled_optimizers", "fixed", "states", "written_out", "golden_rows", "task", "threads"}
)


@dataclass(frozen=True, slots=True)
class RecipeVariant:
    """The part of a recipe for one additional variant. The attributes have the same meanings as in Recipe."""

    name: str
    backend: str
    form: Form
    model_sha256: str
    figures: Mapping[str, Any]
    threads: Annotated[int | None, _COUNT] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All decisions for one package.

    Attributes:
        backend: The preferred engine of the target.
        batch: The fixed batch size, or None if the batch is not changed.
        dims: The sizes of the free dimensions in the golden inputs, by name.
        steps: The name and form of each applied optimisation pass.
        form: The form of the weights and of the arithmetic.
        golden_ranges: The smallest and largest value of each input, by name.
        labels: The class names as text with one name per line, or None.
        task: The meaning of the outputs, as in the manifest, or None.
        tools: The versions of the tools that built the package, by name.
        disabled_optimizers: The names of onnxruntime's optimisations that are disabled for the model.
        fixed: The inputs that were replaced by constants, see `fix_inputs`.
        states: The recurrent states, see `name_states`.
        written_out: The operators that were replaced by their definitions, because the engine does not run
            them.
        golden_rows: The seeds of the additional golden rows.
        threads: The number of engine threads, or None for the default of the engine.
        variants: The additional variants. `backend`, `form`, `model_sha256` and `figures` describe the
            default variant.
    """

    name: str
    version: str
    target: str
    backend: str
    source_sha256: str
    batch: Annotated[int | None, _COUNT]
    dims: Mapping[str, Annotated[int, _COUNT]]
    steps: tuple[tuple[str, int], ...]
    form: Form
    model_sha256: str
    golden_seed: int
    golden_ranges: Mapping[str, tuple[_Number, _Number]]
    budget: Mapping[str, _Number]
    figures: Mapping[str, Any]
    labels: str | None
    preprocessing: Mapping[str, Any] | None
    tools: Mapping[str, str]
    disabled_optimizers: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    written_out: tuple[str, ...] = ()
    task: Mapping[str, Any] | None = None
    golden_rows: tuple[Annotated[int, Range(0, MAX_SEED)], ...] = ()
    threads: Annotated[int | None, _COUNT] = None
    variants: tuple[RecipeVariant, ...] = ()

    def of_variant(self, variant: RecipeVariant) -> "Recipe":
        """Return the recipe of a package that contains only `variant`, which is one of `variants`."""
        return replace(
            self,
            backend=variant.backend,
            form=variant.form,
            model_sha256=variant.model_sha256,
            figures=variant.figures,
            threads=variant.threads,
            variants=(),
        )

    def to_bytes(self) -> bytes:
        """Return the recipe as canonical JSON without empty optional fields."""
        value = _to_json(self) | {"format": RECIPE_FORMAT}
        value["variants"] = [_without_empty(_to_json(variant)) for variant in self.variants]
        return encode_json(_without_empty(value))

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def write(self, path: Path) -> None:
        """Write the recipe as indented JSON with its sha256.

        Raises:
            OutputError: The file cannot be written.
        """
        value = {**json.loads(self.to_bytes()), "sha256": self.sha256}
        text = json.dumps(value, indent=1, ensure_ascii=False)
        write_text_atomically(path, f"{text}\n")


_read_version = functools.cache(metadata.version)  # each candidate has a recipe


def tool_versions(*backends: str) -> dict[str, str]:
    """Return the versions of the installed tools that packages for these backends depend on, by name."""
    names = dict.fromkeys((*_TOOLS, *(tool for name in backends for tool in find_support(name).tools)))
    versions = {"edgekit": __version__}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):  # then it made no form of the model
            versions[name] = _read_version(name)
    return versions


def read_recipe(path: Path) -> Recipe:
    """Read the recipe at `path`.

    Raises:
        RecipeError: The file is unreadable, too large, malformed (the message names the field) or modified.
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
        stated = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise RecipeError(f"{path}: format is {stated!r}, expected {RECIPE_FORMAT!r}")
    try:
        _check_digest(value)
        members = {name: item for name, item in value.items() if name not in {"format", "sha256"}}
        return _read(members)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:  # from encode_json
        raise RecipeError(f"{path}: holds what JSON in UTF-8 cannot: {error}") from error


def _check_digest(value: Mapping[str, Any]) -> None:
    members = {name: item for name, item in value.items() if name != "sha256"}
    digest = hashlib.sha256(encode_json(members)).hexdigest()
    if value.get("sha256") != digest:
        raise RecipeError(
            f"has sha256 {digest}, it states {value.get('sha256')}: it was edited or damaged; fetch it again,"
            " or package the model again with other options"
        )


def _without_empty(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if item or name not in _OPTIONAL}


def _to_json(record: Recipe | RecipeVariant) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)} | {
        "form": record.form.to_json()
    }


def _read(value: dict[str, Any]) -> Recipe:
    """Return the recipe that a JSON object states.

    Raises:
        RecipeError: a field is missing, malformed or unknown; the message names it.
    """
    variants = value.get("variants", [None])
    if not isinstance(variants, list) or not 1 <= len(variants) <= MAX_VARIANTS:
        raise RecipeError(f"variants: expected a list of 1 to {MAX_VARIANTS}")
    for part in (value, *variants):
        if isinstance(part, dict) and "form" in part:
            part["form"] = Form.from_json(part["form"])
    recipe = from_plain(Recipe, value, error=RecipeError)
    names = [variant.name for variant in recipe.variants]
    if len(set(names)) < len(names):
        raise RecipeError(f"variants: a name stands twice in {', '.join(names)}")
    records: list[Recipe | RecipeVariant] = [recipe, *recipe.variants]
    for record in records:
        if record.backend not in list_supported():
            raise RecipeError(f"backend is {record.backend!r}, expected one of {', '.join(list_supported())}")
    return recipe
