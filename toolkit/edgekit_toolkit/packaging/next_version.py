"""The version of a package that nobody stated: the one after all that are in the folder."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.package.archive import read_unverified_manifest
from edgekit_toolkit.pipeline.state import Draft, Request, Run

_SERIES: Final = "1.0"
FIRST_VERSION: Final = f"{_SERIES}.0"


def with_free_version(request: Request, folder: Path) -> Request:
    """Return the request with the patch after the highest 1.0.x of which a package is in the folder.

    Gaps stay: a package of a lower version than one that was delivered would not be an update.
    """
    before, after = (re.escape(part) for part in _place(request, folder, "?").name.split("?"))
    wanted = re.compile(rf"{before}{re.escape(_SERIES)}\.([0-9]{{1,9}}){after}")
    # A link or a folder of such a name is no package; writing replaces the one and refuses the other.
    packages = (path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    found = [wanted.fullmatch(name) for name in packages]
    patch = max((int(match[1]) for match in found if match is not None), default=-1) + 1
    return replace(request, version=_version(patch))


def with_version_of_same_content(run: Run, folder: Path) -> Run:
    """Return the run under the version before its own, if that package is in the folder and has its content.

    Args:
        run: with the version of `with_free_version`, and a chosen candidate.
        folder: where packages are written.
    """
    patch = int(run.request.version.rpartition(".")[2])
    if patch == 0:
        return run
    before = _version(patch - 1)
    path = _place(run.request, folder, before)
    draft = _renamed(run.packaged(str(run.choice.chosen)), before)
    if _has_content(path, draft):
        return replace(run, request=replace(run.request, version=before), whole=draft)
    note = f"{path.name} was there with other content, so this is {run.request.version}; --version decides"
    return replace(run, warnings=[*run.warnings, note])


def _version(patch: int) -> str:
    return f"{_SERIES}.{patch}"


def _place(request: Request, folder: Path, version: str) -> Path:
    return folder / f"{request.name}-{version}-{request.target.name}.edgepkg"


def _renamed(draft: Draft, version: str) -> Draft:
    """Return a draft under another version: its recipe and its manifest state one."""
    recipe = replace(draft.recipe, version=version)
    manifest = draft.package.manifest
    provenance = {**manifest.provenance, "recipe_sha256": recipe.sha256}
    named = replace(manifest, version=version, provenance=provenance)
    return replace(draft, recipe=recipe, package=replace(draft.package, manifest=named))


def _has_content(path: Path, draft: Draft) -> bool:
    """Whether a package file is this draft, whoever signed it: a manifest has the digest of each artifact."""
    try:
        return read_unverified_manifest(path).manifest.to_bytes() == draft.package.manifest.to_bytes()
    except EdgekitError:
        return False
