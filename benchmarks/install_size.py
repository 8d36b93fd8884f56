"""How many packages and bytes an install of edgekit takes, measured in fresh environments.

    scripts/python benchmarks/install_size.py [device] [device-litert] [host] [edgekit[device]] ...

Installs the pinned requirements and the wheels of this checkout, without pip itself and without bytecode (a
device with a read-only root never writes any); the bytecode of every module is then measured separately.
A kind with an extra, such as "edgekit[device]" or "edgekit[device] onnxruntime==1.31.1", is installed as pip
does it for a user, with the newest releases that fit and with bytecode. MB are 10^6 bytes of file content.
What is ours is shown by folder, with the docstrings in it, and with the agent of the fleet, which a device
install must be able to start.
"""

import ast
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


@dataclass(frozen=True, slots=True)
class Install:
    python: Path
    site_packages: Path

    def packages(self) -> list[str]:
        return sorted(info.name.split("-")[0] for info in self.site_packages.glob("*.dist-info"))

    def bytes_by_folder(self, within: str = "") -> Counter[str]:
        """Bytes of file content by top-level name in site-packages, or of sources in a folder there."""
        sizes: Counter[str] = Counter()
        top = self.site_packages / within
        for path in top.rglob("*"):
            if path.is_file() and (not within or path.suffix != ".pyc"):
                sizes[path.relative_to(top).parts[0]] += path.stat().st_size
        return sizes


def count_docstrings(folder: Path) -> int:
    """Return the bytes of docstrings, with their indentation, in the modules of a folder."""
    found = 0
    for path in folder.rglob("*.py"):
        text = path.read_text()
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
                first = node.body[0]
                found += len("".join(lines[first.lineno - 1 : first.end_lineno]).encode())
    return found


def build_wheels(folder: Path) -> dict[str, Path]:
    """Build the wheels of this checkout with the installed hatchling; returns distribution -> path."""
    for project in (ROOT, ROOT / "host"):
        _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], project)
    return {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


def start_agent(made: Install) -> str:
    """Start the agent on a device that is in no fleet, and return what it says of that."""
    with tempfile.TemporaryDirectory() as home:
        variables = {"EDGEKIT_HOME": home, "EDGEKIT_STATE": f"{home}/state", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [str(made.python), "-m", "edgekit_runtime.cli", "agent"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, cwd=home)
    if "this device is in no fleet" not in done.stderr:
        raise subprocess.CalledProcessError(done.returncode, command, done.stderr)
    return done.stderr.strip()


def install(kind: str, wheels: Mapping[str, Path], folder: Path) -> Install:
    """Install `requirements/<kind>.txt` and our wheels for that kind into a new environment in `folder`."""
    install_requirements(kind, folder)
    return install_wheels(kind, wheels, folder)


def install_requirements(kind: str, folder: Path) -> None:
    """Install `requirements/<kind>.txt` into a new environment in `folder`."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    requirements = ROOT / "requirements" / f"{kind}.txt"
    _run([*_install_into(folder), "--require-hashes", "-r", str(requirements)])


def install_wheels(kind: str, wheels: Mapping[str, Path], folder: Path) -> Install:
    """Install our wheels for a kind into an environment that has its requirements."""
    ours = ("edgekit", "edgekit-host") if kind == "host" else ("edgekit",)
    _run([*_install_into(folder), *(str(wheels[name]) for name in ours)])
    return Install(folder / "bin" / "python", next(folder.glob("lib/python*/site-packages")))


def _install_into(folder: Path) -> list[str]:
    python = str(folder / "bin" / "python")
    return [*PIP, "--python", python, "install", "--no-deps", "--no-compile", "--only-binary=:all:"]


def install_plainly(kind: str, wheels: Mapping[str, Path], folder: Path) -> Install:
    """Install a kind such as `edgekit[device]`, and further requirements, as a user does."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    links = ["--find-links", str(wheels["edgekit"].parent)]
    _run([*PIP, "--python", str(python), "install", *links, *kind.split()])
    return Install(python, next(folder.glob("lib/python*/site-packages")))


def _run(command: list[str], folder: Path = ROOT) -> None:
    subprocess.run(
        command, cwd=folder, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _shown(made: Install) -> str:
    """Return packages with their versions and the size of an install with its bytecode."""
    folders = made.bytes_by_folder()
    bytecode = sum(path.stat().st_size for path in made.site_packages.rglob("*.pyc"))
    versions = sorted(info.name.removesuffix(".dist-info") for info in made.site_packages.glob("*.dist-info"))
    largest = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in folders.most_common(4))
    total = sum(folders.values())
    return (
        f"{total / 1e6:.1f} MB, {(total - bytecode) / 1e6:.1f} MB of it without bytecode ({largest});"
        f" {', '.join(versions)}"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheels = build_wheels(folder)
        sizes = ", ".join(f"{name} {path.stat().st_size / 1e6:.2f} MB" for name, path in wheels.items())
        print(f"Python {sys.version.split()[0]}, wheels: {sizes}")
        for kind in sys.argv[1:] or ["device", "device-litert", "host", "edgekit[device]"]:
            if "[" in kind:
                made = install_plainly(kind, wheels, folder / kind)
                print(f"{kind}, as pip leaves it: {_shown(made)}")
                continue
            made = install(kind, wheels, folder / kind)
            folders = made.bytes_by_folder()
            _run([str(made.python), "-m", "compileall", "-q", str(made.site_packages)])
            bytecode = sum(made.bytes_by_folder().values()) - sum(folders.values())
            own = sum(size for folder_name, size in folders.items() if folder_name.startswith("edgekit"))
            print(
                f"{kind}: {len(made.packages())} packages with edgekit, {sum(folders.values()) / 1e6:.1f} MB,"
                f" ours {own / 1e6:.2f} MB; bytecode of every module {bytecode / 1e6:.1f} MB more"
            )
            for folder_name, size in folders.most_common(8):
                print(f"  {size / 1e6:6.1f} MB  {folder_name}")
            top = made.site_packages / "edgekit_runtime"
            print(f"  edgekit_runtime, in kB, and its docstrings, {count_docstrings(top) / 1e3:.0f} in all:")
            for room, size in made.bytes_by_folder("edgekit_runtime/").most_common(12):
                print(f"  {size / 1e3:6.0f} {count_docstrings(top / room) / 1e3:4.0f}  {room}")
            if kind.startswith("device"):
                print(f"  the agent starts: {start_agent(made)}")


if __name__ == "__main__":
    main()
