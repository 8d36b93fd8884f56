"""The default version of a package, which follows the versions in the output folder."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.package.archive import read_unverified_manifest
from edgekit_toolkit.packaging.assemble import PackageDraft
from edgekit_toolkit.packaging.recipe import Recipe

_SERIES: Final = "1.0"
FIRST_VERSION: Final = f"{_SERIES}.0"


def find_free_version(name: str, target: str, folder: Path) -> str:
    """Return the version 1.0.x that follows the highest version of a package for a target in a folder.

    Return `1.0.0` if there is no such package. Gaps are not filled, because a lower version is not an update.
    """
    pattern = re.compile(rf"{re.escape(f'{name}-{_SERIES}.')}([0-9]{{1,9}}){re.escape(f'-{target}.edgepkg')}")
    # A link or a folder of such a name is no package; writing replaces the link and refuses the folder.
    packages = (path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    matches = [pattern.fullmatch(name) for name in packages]
    patch = max((int(match[1]) for match in matches if match is not None), default=-1) + 1
    return f"{_SERIES}.{patch}"


def under_last_version(
    recipe: Recipe, package: PackageDraft, folder: Path
) -> tuple[Recipe, PackageDraft] | str:
    """Reuse the previous version if `folder` contains a package that is equal except for its version.

    Args:
        recipe: The recipe of the new package. Its version comes from `find_free_version`, and is not `1.0.0`.
        package: The new package.
        folder: The output folder.

    Returns:
        The recipe and the new package with the previous version. If the package of the previous version is
        missing, unreadable or different, a warning is returned.
    """
    version = f"{_SERIES}.{int(recipe.version.rpartition('.')[2]) - 1}"
    renamed = replace(recipe, version=version)
    provenance = {**package.manifest.provenance, "recipe_sha256": renamed.sha256}
    manifest = replace(package.manifest, version=version, provenance=provenance)
    path = folder / manifest.file_name
    try:
        # Any signature is enough: a manifest has the digest of each artifact.
        if read_unverified_manifest(path).manifest.to_bytes() == manifest.to_bytes():
            return renamed, replace(package, manifest=manifest)
    except EdgekitError:
        pass
    return f"{path.name} was there with other content, so this is {recipe.version}; --version decides"
