"""Debian packages for arm64, from the mirrors in this machine's apt configuration.

apt runs with its own folders, so the apt configuration of this machine does not change.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgekit_hil.images.programs import run_checked
from edgekit_runtime.errors import BenchError, BenchUnavailableError

_INSTALLED: Final = re.compile(r"Inst (\S+) \((\S+) .*\[(\S+)\]\)")


@dataclass(frozen=True, slots=True)
class DebianArchive:
    """Finds and downloads Debian packages for arm64, with package lists and a cache in `folder`."""

    folder: Path

    def update(self) -> None:
        """Download the arm64 package lists for the suites in this machine's apt configuration.

        Raises:
            BenchUnavailableError: This machine does not run Debian.
            BenchError: apt has no package lists of Debian, or no mirror answers.
        """
        for name in ("state/lists/partial", "cache/archives/partial"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "status").touch()
        columns = "$(ORIGIN)|deb $(REPO_URI) $(RELEASE) $(COMPONENT)"
        listing = run_checked(["apt-get", "indextargets", "--format", columns, "Created-By: Packages"])
        lines = [line.split("|", 1) for line in listing.splitlines()]
        sources = sorted({source for origin, source in lines if origin == "Debian"})
        others = sorted({origin for origin, _ in lines if origin} - {"Debian"})
        if not sources and others:
            raise BenchUnavailableError(
                f"an image is made from Debian's packages, and apt has those of {', '.join(others)} here: use"
                " a machine or a container with Debian"
            )
        if not sources:
            raise BenchError("apt has no lists of Debian's packages here: run `apt-get update` first")
        (self.folder / "sources.list").write_text("\n".join(sources) + "\n")
        self._apt("update")

    def find(self, packages: Sequence[str]) -> list[str]:
        """Return the file names of packages and their dependencies. The names include the versions."""
        matches = map(_INSTALLED.match, self._apt("install", "--simulate", *packages).splitlines())
        names = [f"{name}_{version}_{kind}.deb" for name, version, kind in (m.groups() for m in matches if m)]
        return sorted(name.replace(":", "%3a") for name in names)

    def fetch(self, packages: Sequence[str]) -> list[Path]:
        """Download packages and their dependencies, and return the paths of their files."""
        self._apt("install", "--yes", "--download-only", *packages)
        return [self.folder / "cache" / "archives" / name for name in self.find(packages)]

    def remove_others(self, names: Sequence[str]) -> None:
        """Delete the downloaded files whose names are not in `names`."""
        for path in (self.folder / "cache" / "archives").glob("*.deb"):
            if path.name not in names:
                path.unlink()

    def _apt(self, *arguments: str) -> str:
        options = {
            "Dir::State": self.folder / "state",
            "Dir::Cache": self.folder / "cache",
            "Dir::State::status": self.folder / "status",
            "Dir::Etc::SourceList": self.folder / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "APT::Architecture": "arm64",
            "APT::Architectures": "arm64",
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "",
            "APT::Keep-Downloaded-Packages": "true",
            "Acquire::Languages": "none",
            "Debug::NoLocking": "true",
        }
        return run_checked(
            ["apt-get", "-qq", *(f"--option={name}={value}" for name, value in options.items()), *arguments]
        )
