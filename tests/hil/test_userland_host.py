"""The bench arm64-userland leaves this machine as it was, also after a kill in its middle."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.waiting import is_running, wait_for

import edgekit_runtime
from edgekit_hil.drivers.userland import require_userland
from edgekit_hil.images.image_cache import find_image
from edgekit_runtime.errors import BenchUnavailableError

_SUBREAPER = 36  # of prctl(2): orphans among our descendants become our children
_SESSION = """
import sys
from edgekit_hil.benches.bench_file import find_bench
from edgekit_hil.benches.opening import open_bench
with open_bench(find_bench("arm64-userland")) as bench, bench.open_folder("host", "a test") as device:
    device.run("echo changed >/etc/os-release; echo new >/etc/edgekit-new; rm /etc/hostname; mkdir /usr/new")
    device.start("sleep 600", "log")
    print(bench.command.enter()[1].partition("=")[2], flush=True)
    if sys.stdin.readline() == "work\\n":
        print("working", flush=True)
        device.run("sleep 600", 700)
"""


@pytest.fixture(autouse=True)
def userland() -> None:
    try:
        require_userland()
        find_image(booted=False)
    except BenchUnavailableError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Host:
    """This machine, in a mount namespace that no other program changes meanwhile.

    Attributes:
        pid: of a process in it.
        binfmt: folder where the machine's binfmt_misc is mounted in it.
        folder: of the temporary files and the configuration of a session.
        children: processes that have begun before a session, such as servers of other tests.
    """

    pid: int
    binfmt: Path
    folder: Path
    children: set[int]

    def enter(self, *words: str) -> list[str]:
        return ["nsenter", f"--mount=/proc/{self.pid}/ns/mnt", *words]

    def read_state(self) -> dict[str, object]:
        """Return what a session must not change: mounts, emulators, and files of the image."""
        registered = self.enter("sh", "-c", f"cd {self.binfmt} && grep -r . .")
        image = find_image(booted=False).root
        files = [(image / name).stat() for name in ("etc", "usr", "usr/lib/os-release")]
        return {
            "mounts": Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines(),
            "binfmt": subprocess.run(registered, check=False, capture_output=True, text=True).stdout,
            "image": [(file.st_size, file.st_mtime_ns) for file in files],
            "hostname": os.uname().nodename,
        }

    @contextlib.contextmanager
    def run_session(self) -> Iterator["Session"]:
        """Run a session on the bench."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "EDGEKIT_HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder),
        }
        words = self.enter(sys.executable, "-c", _SESSION)
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
            assert process.stdout is not None
            try:
                yield Session(process, int(process.stdout.readline()))
            finally:
                process.kill()

    def find_cgroups(self, pid: int) -> list[str]:
        """Return the cgroups that bear the number of a process."""
        return [str(each) for each in Path("/sys/fs/cgroup").rglob(f"*-{pid}*") if each.is_dir()]


@dataclass(frozen=True)
class Session:
    """A session on the bench.

    Attributes:
        process: that has opened the bench.
        first: the first process of the userland.
    """

    process: "subprocess.Popen[str]"
    first: int

    def read_namespaces(self) -> set[str]:
        """Return the namespaces that the userland has for itself."""
        mine, theirs = (read_namespaces(pid) for pid in (self.process.pid, self.first))
        return theirs - mine

    def open_for_writing(self, *paths: str) -> tuple[list[str], list[str]]:
        """Return which of these files there are, and the errors of opening each there, with nothing written.

        Files of the kernel check only the user, and root there is root here.
        """
        there = list(filter(os.path.exists, paths))
        enter = ["nsenter", f"--target={self.first}", "--user", "--mount", "--pid", "--root", "--wd"]
        script = f"for path in {' '.join(there)}; do (: >>$path); done"
        done = subprocess.run([*enter, "/bin/sh", "-c", script], check=False, capture_output=True, text=True)
        return there, done.stderr.splitlines()

    def work(self) -> None:
        """Let it run a program."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("work\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "working\n"


def read_namespaces(pid: int | str) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):  # it has ended
        for link in Path(f"/proc/{pid}/ns").iterdir():
            found.add(str(link.readlink()))
    return found


def list_namespaces() -> set[str]:
    """Return the namespaces that any process is in, or that are kept by a mount."""
    pids = (each.name for each in Path("/proc").iterdir() if each.name.isdigit())
    kept = {line.split()[3] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    return set().union(kept, *map(read_namespaces, pids))


def list_running() -> set[int]:
    """Return our children, and processes that have become ours, that still run."""
    return {pid for pid in list_children() if is_running(pid)}


def list_children() -> set[int]:
    """Return our children, and processes that have become ours."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    binfmt = tmp_path / "binfmt"
    binfmt.mkdir()
    script = f"mount -t binfmt_misc none {binfmt} && echo ready && exec sleep 600"
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (tmp_path / "session").mkdir()
        children = list_children()
        yield Host(process.pid, binfmt, tmp_path / "session", children)
        process.kill()
    libc.prctl(_SUBREAPER, 0, 0, 0, 0)
    for pid in list_children() - children:  # those that have become ours
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def run_program_for_arm64() -> str:
    """Return how a program for arm64 ends on this machine itself."""
    try:
        code = subprocess.run([find_image(booted=False).root / "usr/bin/true"], check=False).returncode
    except OSError as error:
        return str(error.strerror)
    return f"exit code {code}"


def assert_unchanged(host: Host, before: dict[str, object], session: Session, own: set[str]) -> None:
    wait_for(lambda: not list_running() - host.children, "every process of the session to end")
    wait_for(lambda: not own & list_namespaces(), "the namespaces of the session to vanish")
    assert host.read_state() == before
    assert host.find_cgroups(session.process.pid) == []


def test_session_leaves_the_machine_as_it_was_into_which_it_cannot_write(host: Host) -> None:
    before, end = host.read_state(), run_program_for_arm64()
    with host.run_session() as session:
        own = session.read_namespaces()
        assert {each.partition(":")[0] for each in own} >= {"user", "mnt", "pid"}
        assert host.read_state() == before  # also meanwhile
        assert run_program_for_arm64() == end
        cgroups = (Path(f"/proc/{pid}/cgroup").read_text() for pid in ("self", session.first))
        assert len(set(cgroups)) == 1
        paths, errors = session.open_for_writing(
            "/proc/sys/kernel/hostname",
            "/proc/sys/vm/swappiness",
            "/proc/sysrq-trigger",
            "/sys/kernel/mm/transparent_hugepage/enabled",
            edgekit_runtime.__file__,
        )
        session.process.communicate("end\n")

    assert session.process.returncode == 0
    assert len(errors) == len(paths) >= 3
    assert all("Read-only file system" in line for line in errors), errors
    assert_unchanged(host, before, session, own)
    assert [each.name for each in host.folder.iterdir()] == ["home"]


def test_session_that_is_killed_leaves_no_more_than_a_folder_which_the_next_one_removes(
    host: Host, *, is_long: bool
) -> None:
    before = host.read_state()
    for is_busy in (False, True) if is_long else (True,):
        with host.run_session() as session:
            own = session.read_namespaces()
            if is_busy:
                session.work()
            session.process.send_signal(signal.SIGKILL)
            session.process.wait()

        assert_unchanged(host, before, session, own)
        assert len(list(host.folder.glob("edgekit-bench-userland-*"))) == 1
    with host.run_session() as again:
        again.process.communicate("end\n")
    assert again.process.returncode == 0
    assert [each.name for each in host.folder.iterdir()] == ["home"]
