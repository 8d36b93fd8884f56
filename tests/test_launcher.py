"""The launcher `./edgekit` in a copy of the checkout with one tiny package of its own: no network is used."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import bounded

ROOT = Path(__file__).parents[1]
# A stand-in for our command line: tells what the launcher handed over, and ends with a code of its own.
ECHO_CLI = """
import os, sys
import pinned

def main():
    print(pinned.VERSION, os.getcwd(), *sys.argv[1:], sep="|")
    return 7
"""


def add_wheel(folder: Path, version: str) -> str:
    """Put a pure wheel `pinned` into the folder and return the requirements that pin it."""
    path = folder / f"pinned-{version}-py3-none-any.whl"
    info = f"pinned-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("pinned.py", f"VERSION = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: pinned\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return f"pinned=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


class Checkout:
    """A copy of the launcher, in a folder with a space in its name, with its own requirements."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.wheels = folder / "wheels"

    def create(self) -> None:
        self.wheels.mkdir()
        (self.root / "requirements").mkdir(parents=True)
        shutil.copy(ROOT / "edgekit", self.root)
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        package = self.root / "host" / "edgekit_cli"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "cli.py").write_text(ECHO_CLI)
        self.pin("1.0")

    def pin(self, version: str) -> None:
        (self.root / "requirements" / "host.txt").write_text(add_wheel(self.wheels, version))

    def start(self, *arguments: str, cwd: Path | None = None, **environment: str) -> "subprocess.Popen[str]":
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))
        }
        offline = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": self.wheels.as_uri(),
            "EDGEKIT_PYTHON": sys.executable,
        }
        return subprocess.Popen(
            [self.root / "edgekit", *arguments],
            cwd=cwd or self.root,
            env=inherited | offline | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *arguments: str, cwd: Path | None = None, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        with bounded(self.start(*arguments, cwd=cwd, **environment)) as process:
            stdout, stderr = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    @property
    def stamp(self) -> Path:
        return self.root / ".venv" / "edgekit-host.stamp"

    @contextlib.contextmanager
    def without_stamp(self) -> Iterator[None]:
        """Take the stamp away during the block; a run of pip, which writes it again, takes half a second."""
        text = self.stamp.read_text()
        self.stamp.unlink()
        yield
        self.stamp.write_text(text)

    def installed(self) -> Path:
        return next((self.root / ".venv").glob("lib/python*/site-packages/pinned.py"))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = Checkout(tmp_path)
    checkout.create()
    return checkout


@pytest.fixture(scope="module")
def first_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkout, list[tuple[int, str, str]]]:
    """A checkout after two first runs at once; exit code, stdout and stderr of each."""
    checkout = Checkout(tmp_path_factory.mktemp("prepared"))
    checkout.create()
    with contextlib.ExitStack() as stack:
        started = [checkout.start("inspect", "two words", str(number)) for number in range(2)]
        runs = [stack.enter_context(bounded(run)) for run in started]
        printed = [run.communicate() for run in runs]
    return checkout, [(run.returncode, *texts) for run, texts in zip(runs, printed, strict=True)]


@pytest.fixture
def prepared(first_runs: tuple[Checkout, list[tuple[int, str, str]]]) -> Checkout:
    """A checkout whose environment is complete; shared, because making one takes seconds."""
    return first_runs[0]


@pytest.fixture
def copied(first_runs: tuple[Checkout, list[tuple[int, str, str]]], tmp_path: Path) -> Checkout:
    """A copy of that checkout for a test that leaves it otherwise."""
    shutil.copytree(first_runs[0].root.parent, tmp_path, symlinks=True, dirs_exist_ok=True)
    return Checkout(tmp_path)


def test_two_first_runs_at_once_succeed_and_one_makes_the_environment_and_says_so(
    first_runs: tuple[Checkout, list[tuple[int, str, str]]],
) -> None:
    checkout, runs = first_runs
    assert [(code, stdout) for code, stdout, _ in runs] == [
        (7, f"1.0|{checkout.root}|inspect|two words|{number}\n") for number in range(2)
    ]
    (said,) = (stderr for _, _, stderr in runs if "making .venv" in stderr)
    for text in ("making .venv with Python", "installing the packages", "ready in", "1 packages"):
        assert text in said


def test_second_run_prepares_nothing(prepared: Checkout) -> None:
    result = prepared.run("--version")
    assert (result.stdout, result.stderr) == (f"1.0|{prepared.root}|--version\n", "")


def test_run_from_another_folder_keeps_that_folder_as_current(prepared: Checkout, tmp_path: Path) -> None:
    assert prepared.run("model.onnx", cwd=tmp_path).stdout == f"1.0|{tmp_path}|model.onnx\n"


def test_modules_in_the_current_folder_do_not_shadow_ours(prepared: Checkout, tmp_path: Path) -> None:
    (tmp_path / "pinned.py").write_text("VERSION = 'a stranger'\n")
    assert prepared.run(cwd=tmp_path).stdout == f"1.0|{tmp_path}\n"


def test_launcher_called_through_a_link_finds_its_checkout(prepared: Checkout, tmp_path: Path) -> None:
    link = tmp_path / "edgekit"
    link.symlink_to(prepared.root / "edgekit")
    result = subprocess.run([link], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout == f"1.0|{tmp_path}\n"


def run_without_writing(checkout: Checkout, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run in a checkout that nobody may write to."""
    command: list[str | Path] = [checkout.root / "edgekit", "x"]
    if os.geteuid() == 0:  # root may write everywhere, unless it gives that up
        if shutil.which("setpriv") is None:
            pytest.skip("root needs setpriv to be kept from writing")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    folders = [path for path in (checkout.root, *checkout.root.rglob("*")) if path.is_dir()]
    folders = [path for path in folders if not path.is_symlink()]
    for path in folders:
        path.chmod(0o555)
    try:
        return subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=False
        )
    finally:
        for path in folders:
            path.chmod(0o755)


def test_checkout_that_cannot_be_written_works_once_it_is_ready(prepared: Checkout, tmp_path: Path) -> None:
    # Another spelling of the same Python: the environment was made under the name of `sys.executable`.
    (tmp_path / "python3").symlink_to(sys.executable)
    for name in (sys.executable, str(tmp_path / "python3")):
        result = run_without_writing(prepared, EDGEKIT_PYTHON=name)
        assert (result.returncode, result.stderr) == (7, "")
    with prepared.without_stamp():
        result = run_without_writing(prepared, EDGEKIT_PYTHON=sys.executable)
    assert result.returncode == 1
    assert "Let its owner run ./edgekit once" in result.stderr


def test_environment_of_the_tests_serves_the_launcher(prepared: Checkout) -> None:
    requirements, venv = prepared.root / "requirements", prepared.root / ".venv"
    (requirements / "dev.txt").write_text("pinned==1.0\n")
    content = (requirements / "dev.txt").read_bytes()
    checksum = subprocess.run(["cksum"], input=content, capture_output=True, check=True).stdout.decode()
    (venv / "edgekit-dev.stamp").write_text(f"{checksum.strip()}|{sys.executable}\n")
    with prepared.without_stamp():
        result = run_without_writing(prepared, EDGEKIT_PYTHON=sys.executable)
    assert (result.returncode, result.stderr) == (7, "")
    (requirements / "dev.txt").unlink()


@pytest.mark.parametrize("part", ["fleet", "hil"])
def test_part_installs_what_it_needs_and_serves_the_other_commands(copied: Checkout, part: str) -> None:
    """A bench installs the packages of the fleet too, which its tests run."""
    assert copied.run("inspect").stdout.startswith("1.0|")
    (copied.root / "requirements" / "fleet.txt").write_text(add_wheel(copied.wheels, "2.0"))
    (copied.root / "requirements" / "hil.txt").write_text("")
    assert copied.run(part, "up").stdout.startswith("2.0|")
    assert (copied.root / ".venv" / f"edgekit-{part}.stamp").exists()
    copied.stamp.unlink()
    result = copied.run("inspect")
    assert result.stdout.startswith("2.0|") and result.stderr == ""


def test_changed_requirements_are_installed_on_the_next_run(copied: Checkout) -> None:
    copied.pin("2.0")
    result = copied.run()
    assert result.stdout.startswith("2.0|")
    assert "making .venv" not in result.stderr


def test_file_that_is_not_the_pinned_one_is_refused(copied: Checkout) -> None:
    copied.pin("3.0")
    add_wheel(copied.wheels, "3.0")  # the same content again, then one byte more
    with (copied.wheels / "pinned-3.0-py3-none-any.whl").open("ab") as wheel:
        wheel.write(b"\0")
    result = copied.run()
    assert result.returncode == 1
    assert "not the one that was pinned" in result.stderr


def test_install_cut_short_is_repaired_by_the_next_run(prepared: Checkout) -> None:
    # What a killed pip leaves behind: metadata that says "installed", with files missing.
    prepared.installed().unlink()
    (prepared.root / ".venv" / "edgekit-installing").touch()
    prepared.stamp.unlink()
    assert prepared.run().stdout.startswith("1.0|")


@pytest.mark.long
def test_environment_cut_short_is_repaired_by_the_next_run(checkout: Checkout) -> None:
    # What a killed `python -m venv` leaves behind: an interpreter without pip.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", checkout.root / ".venv"], check=True)
    assert checkout.run().stdout.startswith("1.0|")


def test_no_python_named_or_found_says_which_versions_work(checkout: Checkout) -> None:
    result = checkout.run(EDGEKIT_PYTHON="/no/such/python3")
    assert result.returncode == 1
    assert "Python 3.10 to 3.13" in result.stderr
    assert "/no/such/python3" in result.stderr


@pytest.mark.parametrize(
    ("code", "output", "expected"),
    [(3, "3.9.2", "is Python 3.9.2"), (4, "3.11.2", "apt-get install python3-venv")],
    ids=["too_old", "without_venv"],
)
def test_unusable_python_is_named_with_its_reason(
    checkout: Checkout, tmp_path: Path, code: int, output: str, expected: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {output}\nexit {code}\n")
    python.chmod(0o755)
    result = checkout.run(EDGEKIT_PYTHON=str(python))
    assert result.returncode == 1
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_unreachable_index_is_told_from_other_failures(copied: Checkout) -> None:
    copied.pin("4.0")
    result = copied.run(
        PIP_NO_INDEX="0", PIP_INDEX_URL="http://127.0.0.1:9/", PIP_FIND_LINKS="", PIP_RETRIES="1"
    )
    assert result.returncode == 1
    assert "index cannot be reached" in result.stderr
    assert "Traceback" not in result.stderr
