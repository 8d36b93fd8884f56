"""Package, install and serve with an empty home: nothing is written and nobody is asked that is not ours."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest

from tests.service.serve_parts import wait_ready
from tests.waiting import bounded

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "tiny" / "italy_power_mlp.onnx"
OURS = {
    "home/.cache/edgekit",  # what tournaments, tuning and first openings found
    "home/.config/edgekit",  # keys
    "home/.local/state/edgekit",  # installed models
    "work/out",  # what `package` was told to write
}

TOOLKIT = "from edgekit_cli.cli import main; main()"
DEVICE = "import sys; from edgekit_runtime.cli import main; sys.exit(main())"
BARE = f"import onnxruntime; onnxruntime.InferenceSession({str(MODEL)!r})"

TRACE = (
    "strace",
    "-D",
    "-f",
    "-qq",
    "--seccomp-bpf",
    "-A",
    "-e",
    "trace=connect,sendto,sendmsg,sendmmsg",
    "-o",
)
# A peer beyond this machine, or a name server wherever it is.
FOREIGN = re.compile(r'AF_INET6?,(?!.*("127\.|"::1"))|htons\(53\)|/nscd/|systemd/resolve')


def can_trace() -> bool:
    """Return whether strace is installed and allowed, which a container may not."""
    if shutil.which(TRACE[0]) is None:
        return False
    return subprocess.run([*TRACE, os.devnull, "true"], capture_output=True, check=False).returncode == 0


CAN_TRACE = can_trace()
needs_trace = pytest.mark.skipif(not CAN_TRACE, reason="strace is not installed, or not allowed")


class Home:
    """An empty home, working folder and folder for temporary files, for processes that know nothing else.

    They do not inherit the environment: what marks a run as one of CI switches onnxruntime's telemetry off.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        for name in ("home", "work", "tmp"):
            (folder / name).mkdir()
        packages = ("device_runtime", "host", "toolkit", "offload", "fleet", "hil")
        self.started = {
            "cwd": folder / "work",
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "env": {
                "HOME": str(folder / "home"),
                "TMPDIR": str(folder / "tmp"),
                "PATH": os.environ["PATH"],
                "EDGEKIT_STATE": str(folder / "home/.local/state/edgekit"),  # as for all users but root
                "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (*packages, "")),
                "PYTHONDONTWRITEBYTECODE": "1",
                "EDGEKIT_BRIEF": "times,memory,races",
                "EDGEKIT_DEVICE_ENGINES": "off",  # else pip fetches one, as docs/reference/commands.md says
            },
        }

    def start(self, code: str, *arguments: str) -> "subprocess.Popen[str]":
        traced = (*TRACE, str(self.calls)) if CAN_TRACE else ()
        return subprocess.Popen([*traced, sys.executable, "-c", code, *arguments], **self.started)  # type: ignore[call-overload,no-any-return]

    def run(self, code: str, *arguments: str) -> None:
        with bounded(self.start(code, *arguments)) as process:
            printed = process.communicate()
        assert process.returncode == 0, printed

    def serve(self) -> None:
        """Start the service with what is installed, and end it once it is ready."""
        path = self.folder / "serve.sock"
        with bounded(self.start(DEVICE, "serve", "--unix-socket", str(path), "--port", "0")) as process:
            wait_ready(process)
            process.terminate()
            printed = process.communicate()
        assert process.returncode == 0, printed

    def written(self) -> set[str]:
        """Return where files lie below the three folders, as far down as the names in `OURS` go."""
        files = (path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
        found = [path for path in files if len(path.parts) > 1]  # beside the three lie trace and socket
        return {next((own for own in OURS if path.is_relative_to(own)), str(path)) for path in found}

    def foreign_calls(self) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if FOREIGN.search(line)]


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home after package, install and serve."""
    home = Home(tmp_path_factory.mktemp("used"))
    home.run(TOOLKIT, "package", str(MODEL), "--target", "rpi5", "--search-seconds", "0", "-o", "out")
    (package,) = (home.folder / "work/out").glob("*.edgepkg")
    home.run(DEVICE, "install", str(package))
    home.serve()
    return home


def test_empty_home_holds_only_what_is_ours_afterwards(used: Home) -> None:
    assert used.written() <= OURS


@needs_trace
def test_nobody_beyond_this_machine_and_no_name_server_is_asked(used: Home) -> None:
    assert "AF_UNIX" in used.calls.read_text()  # it was traced
    assert used.foreign_calls() == []


def test_what_the_engine_writes_by_itself_would_be_found(tmp_path: Path) -> None:
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 29):
        pytest.skip(f"onnxruntime {onnxruntime.__version__} has no telemetry on Linux")
    home = Home(tmp_path)
    home.run(BARE)
    assert not home.written() <= OURS


@needs_trace
def test_query_of_a_name_would_be_found(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.run(
        "import contextlib, socket\nwith contextlib.suppress(OSError): socket.getaddrinfo('a.invalid', 1)"
    )
    assert home.foreign_calls()


@pytest.mark.parametrize("stated", ["0", "1"])
def test_what_the_user_states_is_kept(stated: str) -> None:
    code = "import os, edgekit_toolkit; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": stated}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert done.stdout.decode().strip() == stated


def test_benchmarks_switch_telemetry_off_before_they_import_the_engine() -> None:
    texts = {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    engine = re.compile(r"^ *(import|from) .*\bonnxruntime\b", re.MULTILINE)
    first = {name: found.start() for name, text in texts.items() if (found := engine.search(text))}
    assert "service_latency.py" in first
    assert [name for name, end in first.items() if "\nimport telemetry_off " not in texts[name][:end]] == []
