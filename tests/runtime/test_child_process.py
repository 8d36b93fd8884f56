"""A module of ours in a process of its own: its end, what it leaves, and that nothing else starts one."""

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.descriptor_parts import count_descriptors
from tests.waiting import is_running, wait_for

from edgekit_runtime.system.child_process import ChildProcess, JsonChild

ECHO = """
import json
from edgekit_runtime.system.child_process import open_channel
with open_channel() as channel, channel.makefile("rw") as lines:
    for line in lines:
        if json.loads(line) == "end":
            break
        lines.write(line)
        lines.flush()
"""


ROOT = Path(__file__).parents[2]


def test_processes_are_started_in_one_file() -> None:
    sources = [path for part in ("device_runtime", "toolkit") for path in (ROOT / part).rglob("*.py")]
    assert [path.name for path in sources if "Popen(" in path.read_text()] == ["child_process.py"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def start(folder: Path, code: str, **options: object) -> ChildProcess:
    (folder / "child_of_test.py").write_text(code)
    return ChildProcess("child_of_test", **options)  # type: ignore[arg-type]


def test_output_and_last_line_are_kept_apart(folder: Path) -> None:
    code = "import sys; print('out'); print('one', file=sys.stderr); sys.exit('two')"
    with start(folder, code, output="keep") as child:
        assert child.wait(60.0) == 1
        assert (child.output, child.last_line) == (b"out\n", "two")
        assert child.explain_end() == "with exit code 1: two"


def test_large_output_does_not_stop_a_child(folder: Path) -> None:
    code = "import sys; sys.stdout.write('x' * (1 << 22)); sys.stderr.write('y' * (1 << 22))"
    with start(folder, code, output="keep") as child:
        assert child.wait(60.0) == 0
        assert len(child.output) == 1 << 22
        assert set(child.last_line) == {"y"}


def test_a_child_that_hangs_is_waited_for_no_longer_and_killed_at_the_end(folder: Path) -> None:
    with start(folder, "import time; time.sleep(600)") as child:
        assert child.wait(0.05) is None
    assert child.wait(0.0) == -signal.SIGKILL
    assert not is_running(child.pid)


def test_children_leave_no_descriptors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = count_descriptors()
    for _ in range(3):
        with start(folder, ECHO):
            pass
        with JsonChild("child_of_test"):
            pass
    monkeypatch.setattr(sys, "executable", str(folder / "nothing"))
    for start_one in (ChildProcess, JsonChild):
        with pytest.raises(OSError, match="nothing"):
            start_one("child_of_test")
    assert count_descriptors() == before


def test_documents_are_exchanged_until_the_child_ends(folder: Path) -> None:
    (folder / "child_of_test.py").write_text(ECHO)
    with JsonChild("child_of_test") as child:
        child.send({"a": [1, None]}, 60.0)
        assert child.receive(60.0) == {"a": [1, None]}
        with pytest.raises(TimeoutError):
            child.receive(0.01)
    with JsonChild("child_of_test") as child:
        child.send("end", 60.0)
        with pytest.raises(EOFError):
            child.receive(60.0)
        assert child.wait(60.0) == 0


def test_a_child_ends_with_its_parent(folder: Path) -> None:
    (folder / "child_of_test.py").write_text(ECHO)
    parent = """
import os, time
from edgekit_runtime.system.child_process import JsonChild
child = JsonChild("child_of_test")
child.send(1, 60.0)
child.receive(60.0)
os.kill(child.pid, 19)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    (folder / "parent_of_test.py").write_text(parent)
    with ChildProcess("parent_of_test", output="keep") as process:
        assert process.wait(60.0) == -signal.SIGKILL
        pid = int(process.output)
    wait_for(lambda: not is_running(pid), "the end of the child")


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this Python opens no descriptors of processes")
def test_a_child_is_waited_for_without_descriptors_of_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with start(folder, "import time; time.sleep(0.2)") as child:
        assert child.wait(0.01) is None
        assert child.wait(60.0) == 0
