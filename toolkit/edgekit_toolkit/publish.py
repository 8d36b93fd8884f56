"""Write what a run decided: package, evidence, recipe and report, each whole or not at all."""

import datetime
import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from edgekit_runtime import __version__
from edgekit_runtime.archive import write_package
from edgekit_runtime.errors import BackendError, OutputError, RecipeError
from edgekit_runtime.evidence import evidence_path, write_evidence
from edgekit_runtime.files import hash_file
from edgekit_toolkit.importers.onnx import load_onnx
from edgekit_toolkit.measure import PeakMemory, measure_peak_memory
from edgekit_toolkit.pack import Assembled, assemble
from edgekit_toolkit.passes.pipeline import replay
from edgekit_toolkit.quantize.forms import build
from edgekit_toolkit.recipe import Recipe, tool_versions
from edgekit_toolkit.sign import StatementSigner
from edgekit_toolkit.targets import Target


@dataclass(frozen=True, slots=True)
class Published:
    """Files that were written."""

    package: Path
    evidence: Path
    recipe: Path
    size_bytes: int
    sha256: str
    key_id: str


def publish(
    assembled: Assembled, recipe: Recipe, evidence: Mapping[str, Any], folder: Path, signer: StatementSigner
) -> Published:
    """Write package, evidence and recipe into `folder`.

    Raises:
        OutputError: the folder cannot be made, or a file cannot be written; an earlier package stays as it was.
    """
    make_folder(folder)
    path = folder / assembled.manifest.file_name
    write_package(path, assembled.manifest, assembled.artifacts, signer)
    recipe_path = path.with_name(path.name.removesuffix(".edgepkg") + ".recipe.json")
    recipe.write(recipe_path)
    write_evidence(evidence_path(path), path, evidence, signer)
    return Published(
        path, evidence_path(path), recipe_path, path.stat().st_size, hash_file(path), signer.key_id
    )


def make_folder(folder: Path) -> None:
    """Make the output folder, before any work is done for it.

    Raises:
        OutputError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"the output folder {folder} cannot be made: {error.strerror}; choose another by -o"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"the output folder {folder} is not writable; choose another by -o")


def repeat(model_path: Path, recipe: Recipe, target: Target) -> Assembled:
    """Return the package that `recipe` makes of the model at `model_path`, without a search.

    Raises:
        RecipeError: the recipe is of another model, or these tools make another model of it.
        ModelError: the model cannot be used.
    """
    source = load_onnx(model_path)
    if source.sha256 != recipe.source_sha256:
        raise RecipeError(
            f"the recipe is for a model with sha256 {recipe.source_sha256}, but {model_path} has {source.sha256}"
        )
    floats = onnx.shape_inference.infer_shapes(replay(source.model, batch=recipe.batch, applied=recipe.steps))
    model = build(floats, recipe.form)
    made = None if model is None else hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    if model is None or made != recipe.model_sha256:
        here = tool_versions()
        changed = [
            f"{name} {version} (here {here.get(name)})"
            for name, version in recipe.tools.items()
            if here.get(name) != version
        ]
        raise RecipeError(
            f"the recipe makes a model with sha256 {made} here, it states {recipe.model_sha256}; "
            + (f"it was made with {', '.join(changed)}" if changed else "it was edited by hand or is damaged")
        )
    return assemble(recipe, target, floats, model)


def host_facts() -> dict[str, Any]:
    """What the figures of this machine depend on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in _read("/proc/cpuinfo").splitlines()
            if line.startswith(("model name", "Model"))
        ),
        platform.processor() or platform.machine(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count() or 1,
        "os": platform.platform(),
        "python": platform.python_version(),
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def now() -> str:
    """The time, ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def measured_memory(assembled: Assembled, feeds: Mapping[str, Any]) -> PeakMemory | None:
    """Peak memory of a fresh process here that runs the package's model, or None where it cannot be measured."""
    try:
        return measure_peak_memory(assembled.artifacts["model.onnx"], dict(feeds))
    except BackendError:
        return None


def evidence_of(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Evidence: figures that vary from run to run, with where and when they were taken."""
    return {"edgekit": __version__, "created": now(), "host": host_facts(), **figures}
