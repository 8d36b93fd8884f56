"""A copy of a process behaves as one that Python starts."""

import json
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgekit_runtime.system.child_process import child_environment
from tests.fork_server import host_server, runtime_server
from tests.service.serve_parts import environment

SHOW = """
import json, os, pathlib, resource, sys
status = dict(line.split(":\t") for line in pathlib.Path("/proc/self/status").read_text().splitlines())
print(json.dumps({
    **{name: status[name].strip() for name in ("Umask", "SigIgn", "SigBlk", "NoNewPrivs", "CapEff")},
    "limits": pathlib.Path("/proc/self/limits").read_text(),
    "cgroup": pathlib.Path("/proc/self/cgroup").read_text(),
    "folder": os.getcwd(), "variables": dict(os.environ), "niceness": os.nice(0),
    "streams": [os.readlink(f"/proc/self/fd/{number}") for number in (0, 2)],
    "import path": sys.path, "arguments": sys.argv, "__name__": __name__,
    "descriptors": len(os.listdir("/proc/self/fd")),
}))
"""
COMMANDS = {
    "an output": (("edgekit_runtime.cli", "--version"), ""),
    "an exit code": (("edgekit_runtime.cli", "pin", "--no-such-option"), ""),
    "an input": (("json.tool", "--compact"), '{"a": 1}'),
    "no module": (("no_such_module",), ""),
}


@pytest.mark.parametrize(("command", "text"), COMMANDS.values(), ids=COMMANDS)
def test_copy_ends_as_the_process_whose_copy_it_is(command, text):
    started, copied = (run(popen, command, text) for popen in (subprocess.Popen, runtime_server().popen))
    assert started == copied


@pytest.mark.parametrize("command", [("keys", "list", "--json"), ("hil", "repaired", "none.yaml")])
def test_copy_of_the_host_ends_as_the_process_whose_copy_it_is(tmp_path, command):
    settings = ["env", "EDGEKIT_LIST=", f"EDGEKIT_HOME={tmp_path}"]
    words = [*settings, sys.executable, "-m", "edgekit_cli", *command]
    options = {"env": child_environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    copied, started = (popen(words, **options) for popen in (host_server().popen, subprocess.Popen))
    assert type(copied) is not subprocess.Popen
    assert copied.communicate() == started.communicate()
    assert copied.returncode == started.returncode


def test_copy_has_what_a_process_has_that_python_starts(tmp_path):
    (tmp_path / "shown.py").write_text(SHOW)
    runtime_server()  # which began before the limits, the umask and the signals that follow
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    umask, ignored = os.umask(0o027), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 7, hard))
    try:
        started, copied = (
            json.loads(run(popen, ("shown", "a", "--b"), "", cwd=tmp_path, env=environment(tmp_path))[1])
            for popen in (subprocess.Popen, runtime_server().popen)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGHUP, ignored)
        os.umask(umask)
    copied["descriptors"] -= 1  # that of its server
    for shown in (started, copied):
        shown["streams"][0] = shown["streams"][0].partition(":")[0]  # a pipe of its own
    assert copied == {**started, "variables": copied["variables"]}
    assert copied["variables"].items() >= started["variables"].items()


OTHERS = {
    "an import path": {"env": {**os.environ, "PYTHONPATH": "/elsewhere"}},
    "a setting of Python": {"env": {**environment(Path("/h")), "PYTHONHASHSEED": "1"}},
    "a setting of a library": {"env": {**environment(Path("/h")), "OPENBLAS_NUM_THREADS": "3"}},
    "a time zone": {"env": {**environment(Path("/h")), "TZ": "Asia/Tokyo"}},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_start_that_a_copy_could_not_show_is_that_of_python(options):
    process = runtime_server().popen([sys.executable, "-m", "json.tool"], stdin=subprocess.DEVNULL, **options)
    assert process.wait(60) == 1
    assert type(process) is subprocess.Popen


def test_copy_imports_from_further_folders_unless_they_hide_a_module(tmp_path):
    (tmp_path / "shown.py").write_text(SHOW)
    (tmp_path / ".models").mkdir()  # `importlib` fails for this name, since there is a folder `models`
    runtime = environment(tmp_path)["PYTHONPATH"]
    env = {**environment(tmp_path), "PYTHONPATH": f"{tmp_path}{os.pathsep}{runtime}"}
    started, copied = (
        json.loads(run(popen, ("shown",), "", cwd="/", env=env)[1])["import path"]
        for popen in (subprocess.Popen, runtime_server().popen)
    )
    assert started == copied
    for name, is_copy in (("third", True), ("numpy", False), ("json", False), ("sitecustomize", False)):
        module = tmp_path / f"{name}.py"
        module.touch()
        for options in ({"env": env}, {"env": environment(tmp_path), "cwd": tmp_path}):
            with runtime_server().popen(
                [sys.executable, "-m", "this"], stdout=subprocess.DEVNULL, **options
            ) as process:
                assert (type(process) is not subprocess.Popen) == is_copy
        module.unlink()


def test_copies_of_two_servers_that_start_at_once_end_with_their_own_codes(tmp_path):
    command = [sys.executable, "-m", "edgekit_runtime.cli", "pin", "--no-such-option"]

    def start(number):
        popen = (runtime_server().popen, host_server().popen)[number % 2]
        return popen(command, env=environment(tmp_path), stderr=subprocess.DEVNULL).wait(60)

    with ThreadPoolExecutor(4) as pool:
        assert {*pool.map(start, range(60))} == {2}


def test_server_has_the_environment_from_before_the_tests():
    text = """
import os, sys
from tests.fork_server import runtime_server
from tests.service.serve_parts import environment
from pathlib import Path
os.environ["MALLOC_ARENA_MAX"] = "1"
runtime_server()
del os.environ["MALLOC_ARENA_MAX"]
process = runtime_server().popen([sys.executable, "-m", "json.tool", "--help"], env=environment(Path("/h")))
print(type(process).__name__, process.wait(60))
"""
    paths = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, "-c", text], check=True, env={**os.environ, "PYTHONPATH": paths}, capture_output=True
    )
    assert ran.stdout.split()[-2:] == [b"_ForkedPopen", b"0"], ran.stderr


def run(popen, command, text, **options):
    process = popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        **{"env": environment(Path("/h")), **options},
    )
    output, _ = process.communicate(text)
    return process.returncode, output


def test_copy_that_is_killed_says_so_to_its_parent():
    process = runtime_server().popen(
        [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"],
        stderr=subprocess.DEVNULL,
        env=environment(Path("/h")),
    )
    assert type(process) is not subprocess.Popen
    assert process.poll() is None
    assert os.getsid(process.pid) == os.getsid(0)
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL


def test_option_that_a_copy_would_ignore_is_refused():
    with pytest.raises(TypeError, match="process_group"):
        runtime_server().popen([sys.executable, "-m", "this"], env=environment(Path("/h")), process_group=0)
