"""Write what a run decided: package, evidence, recipe and report, each whole or not at all."""

import contextlib
import datetime
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from edgekit_runtime import __version__
from edgekit_runtime.errors import DataError, ManifestError, OutputError, RecipeError
from edgekit_runtime.package.archive import write_package
from edgekit_runtime.package.evidence import evidence_path, write_evidence
from edgekit_runtime.system.atomic_files import hash_file
from edgekit_toolkit.importers.source import load_model
from edgekit_toolkit.measurement.arithmetic import arithmetic_facts
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.ort_options import disable_optimizers
from edgekit_toolkit.packaging.assemble import Assembled, assemble, combine, golden_reference
from edgekit_toolkit.packaging.recipe import Recipe, tool_versions
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from edgekit_toolkit.passes.chain import replay
from edgekit_toolkit.quantize.forms import build


@dataclass(frozen=True, slots=True)
class Published:
    """Names of the files that were written, with size, digest and key of the package."""

    package: str
    evidence: str
    recipe: str
    size_bytes: int
    sha256: str
    key_id: str


@contextlib.contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Make the output folder before any work is done for it; after an error it is as before.

    Folders that were made are removed again, unless something lies in them.

    Raises:
        OutputError: it cannot be made or written to.
    """
    made: list[Path] = []
    try:
        try:
            made.extend(path for path in (folder, *folder.parents) if not path.exists())
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"the output folder {folder} cannot be made: {error.strerror}; choose another by -o"
            ) from error
        _check_writable(folder)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty, or never made
            for path in made:
                path.rmdir()
        raise


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"the output folder {folder} is not writable; choose another by -o")


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """Yield an empty folder in `folder`; its files move there together when the block ends without an error.

    A full disk or an interrupt therefore leaves what was there before, or everything new. Only SIGKILL or a
    power cut leaves the staging folder itself, `.edgekit-*`.

    Raises:
        OutputError: `folder` cannot be written to.
    """
    try:
        stage = Path(tempfile.mkdtemp(prefix=".edgekit-", dir=folder))
        try:
            yield stage
            _check_places(stage, folder)
            try:
                _move_files(stage, folder)
            except KeyboardInterrupt:
                _move_files(stage, folder)  # the rest of it: files of two runs would not fit together
                raise
        except OutputError as error:
            raise OutputError(str(error).replace(str(stage), str(folder))) from error
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except OSError as error:
        raise OutputError(
            f"cannot write into {folder}: {error.strerror or error}; free space, or choose another by -o"
        ) from error


def _check_places(stage: Path, folder: Path) -> None:
    """Refuse before the first file is in its place what would stop a later one."""
    for path in sorted(stage.iterdir()):
        place = folder / path.name
        if place.is_dir() and not place.is_symlink():
            raise OutputError(
                f"cannot write into {folder}: a folder lies at {path.name}, the place of a result; move it"
                " away, or choose another output folder by -o"
            )


def _move_files(stage: Path, folder: Path) -> None:
    # The package last: whoever sees it finds the rest.
    for path in sorted(stage.iterdir(), key=lambda one: (one.suffix == ".edgepkg", one.name)):
        path.replace(folder / path.name)


def publish(
    assembled: Assembled, recipe: Recipe, evidence: Mapping[str, Any], folder: Path, signer: StatementSigner
) -> Published:
    """Write package, evidence and recipe into `folder`, which exists.

    Raises:
        OutputError: a file cannot be written.
    """
    path = folder / assembled.manifest.file_name
    write_package(path, assembled.manifest, assembled.artifacts, signer)
    recipe_path = path.with_name(path.name.removesuffix(".edgepkg") + ".recipe.json")
    recipe.write(recipe_path)
    write_evidence(evidence_path(path), path, evidence, signer)
    return Published(
        path.name,
        evidence_path(path).name,
        recipe_path.name,
        path.stat().st_size,
        hash_file(path),
        signer.key_id,
    )


def repeat(model_path: Path, recipe: Recipe) -> Assembled:
    """Return the package that `recipe` makes of the model at `model_path`, without a search.

    Raises:
        RecipeError: the recipe is of another model, or these tools make another model of it.
        ModelError: the model cannot be used.
    """
    source = load_model(model_path)
    if source.sha256 != recipe.source_sha256:
        raise RecipeError(
            f"the recipe is for a model with sha256 {recipe.source_sha256}, but {model_path} has"
            f" {source.sha256}; give the model that it was made of"
        )
    floats: Model = source.model
    if isinstance(floats, OnnxModel):
        passed = replay(floats.proto, batch=recipe.batch, applied=recipe.steps)
        inferred = onnx.shape_inference.infer_shapes(passed)
        floats = OnnxModel(disable_optimizers(inferred, recipe.disabled_optimizers))
    try:
        reference = golden_reference(floats, recipe.dims, recipe.golden_ranges, recipe.golden_seed)
        first = assemble(recipe, reference, _rebuild(floats, recipe))
        if not recipe.variants:
            return first
        alone = {variant.name: recipe.of_variant(variant) for variant in recipe.variants}
        others = {name: assemble(one, reference, _rebuild(floats, one)) for name, one in alone.items()}
        return combine(first, others, recipe)
    except (DataError, ManifestError) as error:
        raise RecipeError(f"the recipe makes no package: {error}; make another one by its options") from error


def _rebuild(floats: Model, recipe: Recipe) -> Model:
    """Return the model that a recipe is of.

    Raises:
        RecipeError: these tools make another one.
    """
    model = _build(floats, recipe)
    made = None if model is None else hashlib.sha256(model.content).hexdigest()
    if model is None or made != recipe.model_sha256:
        here = tool_versions("litert")
        changed = [
            f"{name} {version} (here {here.get(name)})"
            for name, version in recipe.tools.items()
            if here.get(name) != version
        ]
        raise RecipeError(
            f"the recipe makes a model with sha256 {made} here, it states {recipe.model_sha256}; "
            + (f"it was made with {', '.join(changed)}" if changed else "it was edited by hand or is damaged")
        )
    stated, size_bytes = recipe.figures.get("model_bytes"), len(model.content)
    if stated != size_bytes:
        raise RecipeError(
            f"the recipe states {stated} bytes for a model of {size_bytes};"
            " it was edited by hand or is damaged"
        )
    return model


def _build(floats: Model, recipe: Recipe) -> Model | None:
    """The model of the recipe's form; a conversion is as it was checked when the recipe was made.

    Raises:
        RecipeError: the recipe is for an engine that does not run the model.
    """
    if recipe.backend != "litert":
        if not isinstance(floats, OnnxModel):
            raise RecipeError(
                f"the recipe is for {recipe.backend}, which does not run .tflite models; make another one by"
                " its options"
            )
        made = build(floats.proto, recipe.form)
        return None if made is None else OnnxModel(made)
    from edgekit_toolkit.models.tflite import TfliteModel
    from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer
    from edgekit_toolkit.tflite.convert import convert

    content = convert(floats.proto, recipe.dims) if isinstance(floats, OnnxModel) else floats.content
    written = LiteRtQuantizer(content, threads=1).build(recipe.form)
    return None if written is None else TfliteModel(written)


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
        **arithmetic_facts(),
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


def evidence_of(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Evidence: figures that vary from run to run, with where and when they were taken."""
    return {"edgekit": __version__, "created": now(), "host": host_facts(), **figures}
