"""Imports every module with the packages of each kind that users install, and names those that lack one.

The tests run with the packages of all kinds together, where nothing is ever missing. Here a device gets its
pins, which are its own, in a new environment. The pins of host.txt, fleet.txt and hil.txt must be
those of dev.txt: each of these kinds has a folder with links to its packages in .venv instead.
"""

import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution, distributions
from pathlib import Path

from graph_health import PACKAGES
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# What users add themselves, and what Triton brings.
ADDED = {"ai_edge_litert", "triton_python_backend_utils"}
OPTIONAL = {"edgekit_fleet", "edgekit_hil"}
# Kind -> our packages that run there, and what they may lack: without the fleet, its commands and the agent;
# without hil, its commands.
KINDS = {
    "device": ({"edgekit_runtime"}, set()),
    "host": (PACKAGES.keys() - OPTIONAL, {*ADDED, *OPTIONAL, "paho"}),
    "fleet": (PACKAGES.keys() - {"edgekit_hil"}, {*ADDED, "edgekit_hil"}),
    "hil": (PACKAGES.keys() - {"edgekit_fleet"}, {*ADDED, "edgekit_fleet", "paho"}),
}
IMPORT_ALL = """
import importlib, pkgutil, sys
from edgekit_runtime.system.engines import EngineMissingError
allowed, count, failed = set(sys.argv[1].split(",")), 0, []
for name in sys.argv[2:]:
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
        if module.name.endswith((".__main__", ".migrations.env")):
            continue  # they begin to work when they are imported
        count += 1
        try:
            importlib.import_module(module.name)
        except EngineMissingError as error:  # users add engines themselves; nothing else may need one
            if not any(engine in module.name for engine in ("tflite", "litert", "tensorrt")):
                failed.append(f"  {module.name}: {error}")
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in allowed:
                failed.append(f"  {module.name}: {error}")
print(f"{count} modules", *failed, sep="\\n")
sys.exit(bool(failed))
"""


def read_pins(kind: str) -> dict[str, tuple[str, set[str]]]:
    """Return the packages of requirements/KIND.txt for this machine, each with its version and hashes."""
    pins = {}
    lines = (ROOT / "requirements" / f"{kind}.txt").read_text(encoding="utf-8")
    for line in lines.replace("\\\n", " ").splitlines():
        head, *hashes = line.split("--hash=")
        if not head.strip() or head.startswith("#"):
            continue
        requirement = Requirement(head)
        if requirement.marker is None or requirement.marker.evaluate():
            name = canonicalize_name(requirement.name)
            pins[name] = str(requirement.specifier), {text.strip() for text in hashes}
    return pins


def find_packages() -> dict[str, Distribution]:
    """Return what is installed in .venv, by name."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return {canonicalize_name(package.name): package for package in distributions(path=folders)}


def list_entries(package: Distribution) -> set[str]:
    """Return the entries of site-packages that hold the files of a package."""
    return {path.parts[0] for path in package.files or () if path.parts[0] != ".."}


def link_packages(kind: str, folder: Path) -> Iterator[str]:
    """Fill a new folder with links to the packages of a kind; yields what is wrong with its pins."""
    installed, dev = find_packages(), read_pins("dev")
    owners = defaultdict(set)
    for name, package in installed.items():
        for entry in list_entries(package):
            owners[entry].add(name)
    folder.mkdir()
    for name, pin in read_pins(kind).items():
        if pin != dev.get(name) or name not in installed or pin[0] != f"=={installed[name].version}":
            yield f"  requirements/{kind}.txt pins {name} otherwise than dev.txt: run scripts/lock"
            continue
        package = installed[name]
        entries = list_entries(package)
        shared = {entry for entry in entries if len(owners[entry]) > 1}  # such as the namespace `google`
        for entry in entries - shared:
            (folder / entry).symlink_to(package.locate_file(entry))
        for path in package.files or ():
            if path.parts[0] in shared and "__pycache__" not in path.parts:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).symlink_to(package.locate_file(path))


def install_packages(kind: str, folder: Path) -> Path:
    """Install a kind into a new environment, and return its Python."""
    venv.create(folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    pip += ["--disable-pip-version-check", "--no-compile", "--only-binary=:all:", "--require-hashes"]
    subprocess.run([*pip, "-r", ROOT / f"requirements/{kind}.txt"], check=True, stderr=subprocess.DEVNULL)
    return python


def check(kind: str, folder: Path) -> tuple[str, bool]:
    """Import all of ours with the packages of a kind.

    Returns:
        What was found, and whether all could be imported.
    """
    names, allowed = KINDS[kind]
    path = [ROOT / source for source in {PACKAGES[name] for name in names}]
    if kind == "device":
        python, faults = [install_packages(kind, folder)], []
    else:
        # -S: without the site-packages of .venv.
        python, faults = [sys.executable, "-S"], list(link_packages(kind, folder))
        path.append(folder)
    command = [*python, "-c", IMPORT_ALL, ",".join(allowed), *names]
    variables = {"PYTHONPATH": ":".join(map(str, path))}
    result = subprocess.run(command, env=variables, text=True, capture_output=True, check=False)
    text = "\n".join([*faults, f"{kind}: {result.stdout}{result.stderr}"])
    return text, result.returncode == 0 and not faults


def main() -> int:
    """Check all kinds, two at a time."""
    results = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        for text, is_right in pool.map(lambda kind: check(kind, Path(folder, kind)), KINDS):
            print(text, end="", flush=True)
            results.append(is_right)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
