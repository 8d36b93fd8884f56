"""Makes or mends `.venv` with the pinned packages of one requirements file, and says what it is doing.

Run by environment.sh with any supported Python, before anything is installed: standard library only. It does
not install edgekit itself (the launcher puts the source folders on PYTHONPATH).
"""

import argparse
import contextlib
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
SUPPORTED = ((3, 10), (3, 13))

UNREACHABLE = (
    "NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError"
    "|Failed to establish a new connection|Temporary failure in name resolution|Network is unreachable"
)
# What pip prints, and what the user can do about it; the first match wins.
HINTS = {
    "No space left on device": "the disk is full: free about 400 MB and run this again",
    "Permission denied|Read-only file system": f"{VENV} cannot be written: check who owns it",
    UNREACHABLE: "the package index cannot be reached: check the network, pip's index and proxy settings",
    "DO NOT MATCH THE HASHES": "a file is not the one that was pinned: check the index that pip uses",
    "No matching distribution found": (
        "no ready-made package fits this machine (x86-64 with glibc 2.28+, or macOS 14+ on arm64), "
        "or the index that pip uses lacks it"
    ),
}


class PreparationError(Exception):
    """The environment cannot be made; the message says why and what to do."""


def say(text: str) -> None:
    """Print progress where it cannot mix with a command's output."""
    print(f"edgekit: {text}", file=sys.stderr, flush=True)


class Ticker:
    """One line that is rewritten in place on a terminal, and nothing elsewhere."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.started_s = time.monotonic()

    def show(self, text: str) -> None:
        """Rewrite the line with the seconds since the start."""
        if self.live:
            seconds = time.monotonic() - self.started_s
            print(f"\r\033[K  {seconds:3.0f} s  {text[:68]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Hold the lock of this checkout; the system releases it even if the process is killed."""
    try:
        lock = (ROOT / ".venv.lock").open("w")
    except OSError as error:
        raise PreparationError(
            f"cannot write in {ROOT}: {error.strerror}. Make a checkout that you own"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is preparing .venv; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def version_of(python: Path) -> tuple[int, ...] | None:
    """(major, minor) of an interpreter that starts and has pip, else None."""
    code = "import sys, pip; print(*sys.version_info[:2])"
    try:
        result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return tuple(int(part) for part in result.stdout.split())


def make_venv() -> None:
    """Keep a usable `.venv`, complete one without pip, replace one of another Python.

    Raises:
        PreparationError: `python -m venv` failed.
    """
    version = version_of(PYTHON)
    chosen = os.environ.get("EDGEKIT_PYTHON")
    if (
        version
        and SUPPORTED[0] <= version <= SUPPORTED[1]
        and (not chosen or version == sys.version_info[:2])
    ):
        return
    say(f"making .venv with Python {sys.version.split()[0]}")
    # Kept if it merely lacks pip (cut short, or made by another tool); another Python needs a fresh start.
    for options in ([] if version is None else ["--clear"], ["--clear"]):
        result = subprocess.run(
            [sys.executable, "-m", "venv", *options, VENV], capture_output=True, text=True, check=False
        )
        if result.returncode == 0 and version_of(PYTHON) == sys.version_info[:2]:
            return
    raise PreparationError(explain(f"{sys.executable} -m venv failed", result.stdout + result.stderr))


def explain(failure: str, output: str) -> str:
    """What failed, the likely cause, and the foreign program's own errors (or its last lines)."""
    hint = next((hint for pattern, hint in HINTS.items() if re.search(pattern, output)), None)
    lines = output.strip().splitlines()
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-6:]
    return "\n  ".join([failure if hint is None else f"{failure}: {hint}", *errors])


def install(requirements: Path) -> int:
    """Install exactly the pinned files and return how many packages were new.

    Raises:
        PreparationError: pip failed.
    """
    begun = VENV / "edgekit-installing"
    # pip takes a package whose metadata is there for installed, though an interrupt may have cut it short.
    again = ["--ignore-installed"] if begun.exists() else []
    begun.touch()
    command: list[str | Path] = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
        "--no-color",
    ]
    # --no-deps: the file is complete, and leaves out on purpose what excluded.in names.
    # --no-compile: halves the time; Python compiles what is really imported.
    command += ["--progress-bar=off", "--no-deps", "--no-compile", "--only-binary=:all:", "--require-hashes"]
    process = subprocess.Popen(  # noqa: TID251  # it runs without the runtime
        [*command, *again, "-r", requirements], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None  # noqa: S101 - asked for with PIPE
    ticker, output, fetched, count = Ticker(), "", 0, 0
    for line in process.stdout:
        output += line
        if match := re.match(r"Collecting (\S+)", line):
            fetched += 1
            ticker.show(f"package {fetched}: {match[1]}")
        elif line.startswith("Installing collected packages:"):
            count = line.count(",") + 1
            ticker.show(f"unpacking {count} packages")
    ticker.clear()
    if process.wait() != 0:
        raise PreparationError(explain("pip could not install the packages", output))
    begun.unlink()
    return count


def is_ready(stamp_file: Path, stamp: str) -> bool:
    """Whether `.venv` holds these packages with this Python, however `EDGEKIT_PYTHON` was spelt back then."""
    if not stamp_file.is_file() or stamp_file.read_text().partition("|")[0] != stamp.partition("|")[0]:
        return False
    return version_of(PYTHON) == sys.version_info[:2]


def prepare(kind: str, stamp: str) -> None:
    """Bring `.venv` up to `requirements/<kind>.txt` and write the stamp last.

    Raises:
        PreparationError: the folder cannot be written, or making or filling the environment failed.
    """
    stamp_file = VENV / f"edgekit-{kind}.stamp"
    if not all(os.access(path, os.W_OK) for path in (ROOT, VENV) if path.exists()):
        if is_ready(stamp_file, stamp):
            return
        raise PreparationError(
            f"cannot write in {ROOT}, and .venv there is missing, out of date, or made with a Python that you"
            " cannot run. Let its owner run ./edgekit once, or make a checkout that you own"
        )
    with only_one():
        if stamp_file.is_file() and stamp_file.read_text().startswith(stamp) and version_of(PYTHON):
            return  # the run that we waited for has done it
        started_s = time.monotonic()
        make_venv()
        requirements = ROOT / "requirements" / f"{kind}.txt"
        say(f"installing the packages of requirements/{kind}.txt (once, and when that file changes)")
        count = install(requirements)
        fresh = stamp_file.with_suffix(".new")
        fresh.write_text(stamp + "\n")
        fresh.replace(stamp_file)
        say(f"ready in {time.monotonic() - started_s:.0f} s: {count} packages installed in {VENV}")


def main() -> int:
    """Prepare the environment; 0 when it is usable, 1 when not, 130 when interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", help="name of a file in requirements/, without .txt")
    parser.add_argument("stamp", help="line that identifies the content of that file")
    arguments = parser.parse_args()
    try:
        prepare(arguments.kind, arguments.stamp)
    except PreparationError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run goes on from here")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
