"""The recipe of a package: everything that was decided, so that the same bytes can be made again without a search.

A recipe is as trusted as the model: its figures go into the manifest. They cannot drift from the model, because
the model that a recipe makes must have the digest that the recipe states.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from edgekit_runtime import __version__
from edgekit_runtime.canonical import encode_json
from edgekit_runtime.errors import RecipeError
from edgekit_runtime.files import write_atomically
from edgekit_toolkit.quantize.forms import Form

RECIPE_FORMAT: Final = "https://edgekit.dev/recipe/v1"
MAX_RECIPE_BYTES: Final = 64 << 20
_TOOLS: Final = ("numpy", "onnx", "onnxoptimizer", "onnxruntime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What was decided for one package.

    Attributes:
        name, version, target: of the package.
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
    """

    name: str
    version: str
    target: str
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
    tools: Mapping[str, str] = field(default_factory=lambda: tool_versions())

    def to_bytes(self) -> bytes:
        """Return the recipe as canonical JSON."""
        return encode_json(
            {
                "format": RECIPE_FORMAT,
                "name": self.name,
                "version": self.version,
                "target": self.target,
                "source_sha256": self.source_sha256,
                "batch": self.batch,
                "dims": dict(self.dims),
                "steps": [list(step) for step in self.steps],
                "form": self.form.to_json(),
                "model_sha256": self.model_sha256,
                "golden_seed": self.golden_seed,
                "golden_ranges": {name: list(pair) for name, pair in self.golden_ranges.items()},
                "budget": dict(self.budget),
                "figures": dict(self.figures),
                "labels": self.labels,
                "preprocessing": None if self.preprocessing is None else dict(self.preprocessing),
                "tools": dict(self.tools),
            }
        )

    @property
    def sha256(self) -> str:
        """Digest of the recipe's canonical bytes."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def write(self, path: Path) -> None:
        """Write the recipe, for people to read too.

        Raises:
            OutputError: it cannot be written.
        """
        text = json.dumps(json.loads(self.to_bytes()), indent=1, ensure_ascii=False)
        with write_atomically(path) as file:
            file.write(f"{text}\n".encode())


def tool_versions() -> dict[str, str]:
    """Versions of what decides about the bytes of a package."""
    return {"edgekit": __version__, **{name: metadata.version(name) for name in _TOOLS}}


def read_recipe(path: Path) -> Recipe:
    """Return the recipe at `path`.

    Raises:
        RecipeError: unreadable, too large, or malformed; the message names the field.
    """
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise RecipeError(f"{path}: over the limit of {MAX_RECIPE_BYTES} bytes for a recipe")
        data = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        value = json.loads(data)
    except ValueError as error:
        raise RecipeError(f"{path}: is not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != RECIPE_FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise RecipeError(f"{path}: format is {found!r}, expected {RECIPE_FORMAT!r}")
    try:
        return _parse(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecipeError(f"{path}: is malformed: {error!r}; make it again with `edgekit package`") from error


def _parse(value: Mapping[str, Any]) -> Recipe:
    batch = value["batch"]
    labels, preprocessing = value["labels"], value["preprocessing"]
    return Recipe(
        name=str(value["name"]),
        version=str(value["version"]),
        target=str(value["target"]),
        source_sha256=str(value["source_sha256"]),
        batch=None if batch is None else int(batch),
        dims={str(name): int(size) for name, size in value["dims"].items()},
        steps=tuple((str(name), int(form)) for name, form in value["steps"]),
        form=Form.from_json(value["form"]),
        model_sha256=str(value["model_sha256"]),
        golden_seed=int(value["golden_seed"]),
        golden_ranges={str(name): (float(a), float(b)) for name, (a, b) in value["golden_ranges"].items()},
        budget={str(name): float(limit) for name, limit in value["budget"].items()},
        figures=dict(value["figures"]),
        labels=None if labels is None else str(labels),
        preprocessing=None if preprocessing is None else dict(preprocessing),
        tools={str(name): str(version) for name, version in value["tools"].items()},
    )
