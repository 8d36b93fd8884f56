"""The built wheels, and bare device installs: what a device gets, and what it must not get."""

import contextlib
import email
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

from edgekit_cli.cli import main
from edgekit_runtime import __version__

ROOT = Path(__file__).parents[1]
# Distribution -> import package -> folder.
PACKAGES = {
    "edgekit": {"edgekit_runtime": "device_runtime"},
    "edgekit-host": {
        "edgekit_cli": "host",
        "edgekit_host": "host",
        "edgekit_toolkit": "toolkit",
        "edgekit_offload": "offload",
        "edgekit_fleet": "fleet",
        "edgekit_hil": "hil",
    },
}
NOT_ON_A_DEVICE = {"onnx", "torch", "scipy", "click", "rich", *PACKAGES["edgekit-host"]}
# Imports every module of the runtime; prints what that brought in, and which host libraries could be found.
IMPORT_ALL = f"""
import importlib, importlib.util, json, pkgutil, sys
import edgekit_runtime

def fail(name):
    raise ImportError(name)

names = [m.name for m in pkgutil.walk_packages(edgekit_runtime.__path__, "edgekit_runtime.", onerror=fail)]
for name in names:
    importlib.import_module(name)
found = [name for name in {sorted(NOT_ON_A_DEVICE)} if importlib.util.find_spec(name)]
print(json.dumps({{"imported": names, "loaded": sorted(sys.modules), "found": found}}))
"""

# Verifies a package, runs its golden inputs, and fails unless the outputs are those that the host promised.
SELF_TEST = """
import sys
from pathlib import Path
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.sessions import open_session
from edgekit_runtime.trust.trust_store import TrustStore

package = read_package(Path(sys.argv[1]), TrustStore.from_folder(Path(sys.argv[2])))
result = run_selftest(open_session(package), package)
assert result.checks
print([check.message for check in result.checks])
sys.exit(0 if result.passed else 1)
"""


@pytest.fixture(scope="module")
def install_size() -> ModuleType:
    """The benchmark that makes and measures installs, so that the test and the published figures agree."""
    spec = importlib.util.spec_from_file_location("install_size", ROOT / "benchmarks" / "install_size.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the wheels by scripts/wheels, and what that printed."""
    folder = tmp_path_factory.mktemp("built") / "a b"
    command = [ROOT / "scripts" / "wheels", folder]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


@pytest.fixture(scope="module")
def wheels(built: tuple[Path, str]) -> dict[str, Path]:
    return {path.name.split("-")[0].replace("_", "-"): path for path in built[0].glob("*.whl")}


@pytest.fixture(scope="module")
def device(
    install_size: ModuleType, wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    return make_install(install_size, "device", wheels, tmp_path_factory)


@pytest.fixture(scope="module")
def device_litert(
    install_size: ModuleType, wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    return make_install(install_size, "device-litert", wheels, tmp_path_factory)


@pytest.fixture(scope="module", params=["device", pytest.param("device_litert", marks=pytest.mark.long)])
def any_device(request: pytest.FixtureRequest) -> Any:
    """A bare device install with onnxruntime as its engine, and one with LiteRT."""
    return request.getfixturevalue(request.param)


def make_install(
    install_size: ModuleType, kind: str, wheels: dict[str, Path], factory: pytest.TempPathFactory
) -> Any:
    folder = factory.mktemp(kind) / "venv"
    try:
        shutil.copytree(find_environment(install_size, kind), folder, symlinks=True)
        return install_size.install_wheels(kind, wheels, folder)
    except subprocess.CalledProcessError as error:
        if "connection broken by" in error.output:
            pytest.skip("the package index cannot be reached")
        pytest.fail(error.output)


def find_environment(install_size: ModuleType, kind: str) -> Path:
    """Return an environment with `requirements/KIND.txt`; it is made once and stays in the cache."""
    files = ROOT / "requirements" / f"{kind}.txt", Path(str(install_size.__file__))
    sources = b"".join(path.read_bytes() for path in files)
    digest = hashlib.sha256(sources + f"{sys.base_prefix}, {sys.version}".encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgekit"
    folder = cache / f"{kind}-{digest[:16]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            install_size.install_requirements(kind, Path(name) / "venv")
            with contextlib.suppress(OSError):  # another run was faster
                (Path(name) / "venv").rename(folder)
    return folder


def run_code(device: Any, code: str, *arguments: Path) -> "subprocess.CompletedProcess[str]":
    """Run Python in an install; its bytecode lies beside it, so that it keeps its size."""
    cache = f"pycache_prefix={device.python.parents[2] / 'bytecode'}"
    command = [device.python, "-I", "-X", cache, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("distribution", PACKAGES)
def test_wheel_holds_every_file_of_its_packages_and_nothing_else(
    distribution: str, wheels: dict[str, Path]
) -> None:
    with zipfile.ZipFile(wheels[distribution]) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    there = {
        path.relative_to(ROOT / folder).as_posix()
        for package, folder in PACKAGES[distribution].items()
        for path in (ROOT / folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if distribution == "edgekit-host":
        files = ("device.txt", "device-litert.txt", "device-openvino.txt")
        there |= {f"edgekit_host/requirements/{name}" for name in files}
        there |= {
            f"edgekit_host/released_evidence/{path.name}" for path in (ROOT / "hil" / "evidence").iterdir()
        }
    assert packed == there
    assert sum(name.endswith("/py.typed") for name in packed) == len(PACKAGES[distribution])


def test_host_wheel_has_the_data_of_the_toolkit(wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels["edgekit-host"]) as archive:
        names = archive.namelist()
    assert any(name.endswith(".toml") and "/targets/" in name for name in names)
    assert any(name.endswith(".json") and "/report/" in name for name in names)


@pytest.mark.parametrize(("extra", "extras"), [("host", set()), ("fleet", {"fleet"}), ("hil", {"hil"})])
def test_extra_of_a_host_asks_for_the_host_wheel_of_the_same_version(
    extra: str, extras: set[str], wheels: dict[str, Path]
) -> None:
    asked = {requirement.name: requirement for requirement in read_requirements(wheels["edgekit"], extra)}
    assert asked["edgekit-host"].extras == extras
    back = {requirement.name: requirement for requirement in read_requirements(wheels["edgekit-host"])}
    assert str(back["edgekit"].specifier) == f"=={__version__}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("extra", "ours"),
    [
        ("device", {"edgekit"}),
        ("host", {"edgekit", "edgekit-host"}),
        ("fleet", {"edgekit", "edgekit-host"}),
    ],
)
def test_extra_brings_what_its_machine_needs_in_the_same_version(
    extra: str, ours: set[str], wheels: dict[str, Path]
) -> None:
    """Fails too where the version that the host's distribution asks for is not this one."""
    folder = wheels["edgekit"].parent
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--report", "-", "--find-links", str(folder), f"edgekit[{extra}]=={__version__}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "connection broken by" in result.stderr:
        pytest.skip("the package index cannot be reached")
    assert result.returncode == 0, result.stderr
    chosen = [one["metadata"] for one in json.loads(result.stdout)["install"]]
    found = {one["name"]: one["version"] for one in chosen if one["name"].startswith("edgekit")}
    # A device and a host that run no fleet get no database.
    assert ("sqlalchemy" in {one["name"].lower() for one in chosen}) == (extra == "fleet")
    assert found == dict.fromkeys(ours, __version__)


def test_host_wheel_asks_without_an_extra_for_what_its_command_needs(wheels: dict[str, Path]) -> None:
    """`pip install . ./host` in a checkout names no extra, and `edgekit --version` must work after it."""
    asked = {requirement.name for name in wheels for requirement in read_requirements(wheels[name])}
    assert asked >= {"click", "onnx", "onnxoptimizer", "onnxruntime", "rich"}


def test_no_database_is_asked_for_without_the_extra_of_the_fleet(wheels: dict[str, Path]) -> None:
    for name in wheels:
        asked = {requirement.name.lower() for requirement in read_requirements(wheels[name])}
        assert "sqlalchemy" not in asked
    asked = {requirement.name.lower() for requirement in read_requirements(wheels["edgekit-host"], "fleet")}
    assert "sqlalchemy" in asked


def read_requirements(wheel: Path, extra: str = "") -> list[Requirement]:
    """Return what a wheel asks for, with an extra."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    asked = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    return [each for each in asked if each.marker is None or each.marker.evaluate({"extra": extra})]


def test_script_builds_both_wheels_for_other_machines(
    built: tuple[Path, str], wheels: dict[str, Path]
) -> None:
    folder, printed = built
    assert set(wheels) == {"edgekit", "edgekit-host"}
    assert str(folder) in printed


def test_device_install_imports_every_runtime_module_without_host_libraries(any_device: Any) -> None:
    result = run_code(any_device, IMPORT_ALL)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert "edgekit_runtime.errors" in seen["imported"]
    assert seen["found"] == []
    assert not {name.split(".")[0] for name in seen["loaded"]} & NOT_ON_A_DEVICE


def test_device_install_keeps_its_size_limits(any_device: Any) -> None:
    sizes = any_device.bytes_by_folder()
    own_bytes = sum(size for name, size in sizes.items() if name.startswith("edgekit"))
    assert own_bytes <= 2_600_000
    assert sum(sizes.values()) <= 131_000_000, sizes.most_common(6)


def test_device_install_opens_a_model_with_its_engine(any_device: Any, tmp_path: Path) -> None:
    # Requirements that an engine does not need are left out of the file; this shows that it does not.
    code = (
        "import importlib.util as u, sys\n"
        "if u.find_spec('ai_edge_litert'):\n"
        "    from edgekit_runtime.sessions.litert.session import LiteRtSession as Session\n"
        "else:\n"
        "    from edgekit_runtime.sessions.ort import OrtSession as Session\n"
        "from edgekit_runtime.errors import BackendError\n"
        "try:\n"
        "    Session(b'no model')\n"
        "except BackendError as error:\n"
        "    sys.exit(0 if 'refused the model' in str(error) else str(error))\n"
    )
    result = run_code(any_device, code)
    assert result.returncode == 0, result.stderr


def test_package_made_on_the_host_passes_its_self_test_in_a_device_install(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The engines differ on purpose: the newest on the host, the one in requirements/device.txt here.
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    tiny = ROOT / "models" / "tiny" / "digits_cnn"
    arguments = ["package", f"{tiny}.onnx", "--target", "x86-64", "--out", str(tmp_path)]
    arguments += ["--backend", "ort", "--search-seconds", "0"]
    assert main([*arguments, "--calibration", f"{tiny}.calib.npz", "--eval", f"{tiny}.eval.npz"]) == 0
    package = next(tmp_path.glob("*.edgepkg"))
    result = run_code(device, SELF_TEST, package, tmp_path / "keys")
    assert result.returncode == 0, result.stdout + result.stderr
