"""Finds models in the cache of Hugging Face, in a model of MLflow, and in model packages.

    hf:OWNER/NAME[@REVISION][:FILE]     a file of a repository that `hf download` has put into the cache
    mlflow:PATH                         the ONNX file of a model that MLflow has saved in a folder
    FOLDER.ortpackage                   the CPU variant of a model package of onnxruntime or Olive

Nothing is downloaded. A file outside the folder of the repository, model or model package is refused without
reading it. In the cache of Hugging Face, a file is usually a link to another folder of the same repository,
which is allowed.

Source: huggingface_hub, "Understand caching"; MLflow, "MLmodel file"; onnxruntime, `model_package/README.md`;
the writer of olive-ai 0.13, `olive/cli/model_package.py`.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from edgekit_runtime.errors import ModelError

_HF: Final = "hf:"
_MLFLOW: Final = "mlflow:"
_WORD: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]*"  # never `..`, nor an option
_HF_SOURCE: Final = re.compile(rf"({_WORD})/({_WORD})(?:@([A-Za-z0-9._/-]+))?(?::(.+))?")
_MODEL_ENDINGS: Final = (".onnx", ".tflite", ".pt2")
_USUAL_FILES: Final = ("onnx/model.onnx", "model.onnx")  # of transformers' exporter: the float model
_MAX_NAMED: Final = 8
_MAX_DESCRIPTION_BYTES: Final = 1 << 20
_PROCESSOR: Final = "CPUExecutionProvider"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """The file of a model. `name` is the name of its repository or model package, or None for a path."""

    path: Path
    name: str | None = None


def find_model(source: str) -> LocalModel:
    """Return the file of a source, which is `hf:` (cache), `mlflow:` (folder), a model package or a path.

    Raises:
        ModelError: The source is malformed or not on this machine, has several models, or has a link out of
            its folder.
    """
    if source.startswith(_HF):
        return _find_in_cache(source)
    if source.startswith(_MLFLOW):
        return _find_of_mlflow(Path(source.removeprefix(_MLFLOW)))
    path = Path(source)
    return _find_in_model_package(path) if (path / "manifest.json").is_file() else LocalModel(path)


def is_named(source: str) -> bool:
    """Return whether a source is a public name, `hf:OWNER/NAME`, and not a path on this machine."""
    return source.startswith(_HF)


def _find_in_cache(source: str) -> LocalModel:
    match = _HF_SOURCE.fullmatch(source.removeprefix(_HF))
    if match is None:
        raise ModelError(f"{source!r}: expected hf:OWNER/NAME[@REVISION][:FILE]")
    owner, name, revision, file = match.groups()
    cache = _find_hub_cache()
    repository = cache / f"models--{owner}--{name}"
    download = f"`hf download {owner}/{name}{f' {file}' if file else ''}` puts it there"
    if not repository.is_dir():
        raise ModelError(f"{source}: {cache} has no such repository; {download}")
    snapshot = repository / "snapshots" / _find_commit(repository, revision or "main", source, download)
    if file is None:
        file = _choose_file(snapshot, source, download)
    return LocalModel(_resolve_inside(snapshot, file, repository, source), name)


def _find_hub_cache() -> Path:
    """Return the folder of Hugging Face's cache, by its own variables."""
    if stated := os.environ.get("HF_HUB_CACHE"):
        return Path(stated)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or home) / "hub"


def _find_commit(repository: Path, revision: str, source: str, download: str) -> str:
    """Return the commit of a branch, a tag, or of itself."""
    if ".." in PurePosixPath(revision).parts or PurePosixPath(revision).is_absolute():
        raise ModelError(f"{source}: the revision {revision!r} is no name of a branch, tag or commit")
    reference = repository / "refs" / revision
    commit = revision
    if reference.is_file():
        inside = _resolve_inside(repository, f"refs/{revision}", repository, source)
        commit = inside.read_text(encoding="ascii", errors="replace").strip()
    if not re.fullmatch("[0-9a-f]{6,64}", commit) or not (repository / "snapshots" / commit).is_dir():
        raise ModelError(f"{source}: the cache lacks revision {revision!r}; {download}")
    return commit


def _choose_file(snapshot: Path, source: str, download: str) -> str:
    """Return the one model in a snapshot, or the usual float one of several."""
    files = sorted(
        path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.suffix in _MODEL_ENDINGS
    )
    usual = [file for file in _USUAL_FILES if file in files]
    if len(files) == 1 or len(usual) == 1:
        return (usual or files)[0]
    if not files:
        raise ModelError(f"{source}: its snapshot has no {', '.join(_MODEL_ENDINGS)} file; {download}")
    raise ModelError(f"{source}: it has {_list_some(files)}; name one: {source}:{files[0]}")


def _list_some(files: Sequence[str]) -> str:
    others = f" and {len(files) - _MAX_NAMED} more" if len(files) > _MAX_NAMED else ""
    return f"{', '.join(files[:_MAX_NAMED])}{others}"


def _resolve_inside(folder: Path, file: str, limit: Path, source: str) -> Path:
    """Return the path of a file in `folder`, if it and what it links to lie inside `limit`."""
    path = folder / file
    if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\\" in file:
        raise ModelError(f"{source}: {file!r} leads out of {folder}; refused unread")
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as err:  # RuntimeError: a loop of links
        raise ModelError(f"{source}: {folder} has no {file!r}; check its name, or download it again") from err
    if not target.is_relative_to(limit.resolve()):
        raise ModelError(
            f"{source}: {file!r} is a link to {target}, outside {limit}; refused unread. Give that file's"
            " own path if you trust it"
        )
    return path


def _find_of_mlflow(folder: Path) -> LocalModel:
    source = f"{_MLFLOW}{folder}"
    description = folder / "MLmodel"
    if not description.is_file():
        raise ModelError(
            f"{source}: expected the folder of a saved model, which has a file MLmodel, such as"
            " mlruns/EXPERIMENT/models/MODEL/artifacts; `mlflow artifacts download` fetches one"
        )
    flavors = _read_flavors(_read_description(folder, "MLmodel", source))
    file = flavors.get("onnx", {}).get("data")
    if not file:
        raise ModelError(
            f"{source}: it is saved as {', '.join(flavors) or 'nothing'}, expected onnx; save it with"
            " mlflow.onnx.save_model, or package what is inside: a TensorFlow model with --python"
        )
    return LocalModel(_resolve_inside(folder, file, folder, source), folder.resolve().name)


def _read_flavors(text: str) -> dict[str, dict[str, str]]:
    """Return flavor -> its plain settings, of an MLmodel file: YAML of mappings as MLflow writes them."""
    flavors: dict[str, dict[str, str]] = {}
    inside = False
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip(" "))
        key, colon, value = line.strip().partition(":")
        if depth == 0:
            inside = key == "flavors"
        elif inside and colon and depth == 2:
            flavors[key] = {}
        elif inside and colon and depth == 4 and flavors:
            flavors[next(reversed(flavors))][key] = value.strip().strip("'\"")
    return flavors


def _find_in_model_package(folder: Path) -> LocalModel:
    """Return the model in the component's variant for the processor, or in its only variant."""
    source = str(folder)
    component, variants = _read_component(folder, source)
    on_processor = [
        name
        for name, variant in variants.items()
        if isinstance(variant, dict) and variant.get("ep") == _PROCESSOR
    ]
    chosen = on_processor or list(variants)
    if len(chosen) != 1:
        raise ModelError(
            f"{source}: {len(chosen)} variants could be meant ({_list_some(chosen)}); give the .onnx file of"
            " one of them"
        )
    variant = variants[chosen[0]]
    directory, info = (variant.get(key) for key in ("variant_directory", "executor_info"))
    inner = PurePosixPath(component, _expect_name(directory or chosen[0], source)).as_posix()
    file = _find_model_file(folder, inner, info.get("ort") if isinstance(info, dict) else None, source)
    return LocalModel(_resolve_inside(folder, f"{inner}/{file}", folder, source), folder.resolve().stem)


def _read_component(folder: Path, source: str) -> tuple[str, dict[str, Any]]:
    """Return the component's folder, and its variants: from the manifest, or from a separate file."""
    components = _parse_json(folder, "manifest.json", source).get("components")
    if isinstance(components, list) and all(isinstance(name, str) for name in components):
        components = {name: f"models/{name}/metadata.json" for name in components}  # Olive before 0.14
    if not isinstance(components, dict) or len(components) != 1:
        raise ModelError(
            f"{source}: its manifest names {components!r} as components, expected one; give the .onnx file"
            " of a component"
        )
    (location,) = components.values()
    if isinstance(location, dict):
        component, body = "", location
    else:
        file = PurePosixPath(_expect_name(location, source))
        file = file if file.suffix == ".json" else file / "component.json"
        component, body = file.parent.as_posix(), _parse_json(folder, file.as_posix(), source)
    variants = body.get("variants")
    if (
        not isinstance(variants, dict)
        or not variants
        or not all(isinstance(v, dict) for v in variants.values())
    ):
        raise ModelError(f"{source}: its component names no variants; write the package again")
    return component, variants


def _find_model_file(folder: Path, inner: str, info: Any, source: str) -> str:
    """Return the file that a variant states for onnxruntime, or its only model."""
    if isinstance(info, str):
        info = _parse_json(folder, f"{inner}/{info}", source)
    if isinstance(info, dict) and "model_file" in info:
        return _expect_name(info["model_file"], source)
    variant_folder = _resolve_inside(folder, inner, folder, source)
    files = sorted(path.name for path in variant_folder.glob("*.onnx"))
    if len(files) != 1:
        raise ModelError(
            f"{source}: {variant_folder} has {len(files)} .onnx files, expected one; give its path"
        )
    return files[0]


def _expect_name(value: object, source: str) -> str:
    if not isinstance(value, str) or value.startswith("sha256:"):
        raise ModelError(f"{source}: {value!r} is no path inside the package; give the .onnx file itself")
    return value


def _parse_json(folder: Path, file: str, source: str) -> dict[str, Any]:
    try:
        document = json.loads(_read_description(folder, file, source))
    except (ValueError, RecursionError) as err:
        raise ModelError(f"{source}: {file} is no JSON: {err}; write the package again") from err
    if not isinstance(document, dict):
        raise ModelError(f"{source}: {file} is no JSON object; write the package again")
    return document


def _read_description(folder: Path, file: str, source: str) -> str:
    """Return the text of a small file, which lies inside `folder`."""
    path = _resolve_inside(folder, file, folder, source)
    if not path.is_file() or path.stat().st_size > _MAX_DESCRIPTION_BYTES:
        raise ModelError(
            f"{source}: {file} is no file of at most {_MAX_DESCRIPTION_BYTES} bytes; save it again"
        )
    return path.read_text(encoding="utf-8", errors="replace")
