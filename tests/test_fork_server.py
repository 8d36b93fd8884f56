"""A copy of a process behaves as one that Python starts."""

import os
import signal
import subprocess
import sys

import pytest

from tests.fork_server import runtime_server

SHOW = "import os, sys; print(os.getcwd(), os.environ['HOME'], sys.argv, len(os.listdir('/proc/self/fd')))"
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


def test_copy_has_its_own_folder_and_variables_and_no_descriptors_of_others(tmp_path):
    options = {"cwd": tmp_path, "env": {**os.environ, "HOME": "/of-this-test"}}
    code, output = run(runtime_server().popen, ("code", "-q"), SHOW, **options)
    assert (code, f"{tmp_path} /of-this-test" in output) == (0, True)
    assert int(output.replace(">>>", "").split()[-1]) <= 5  # its own three, its server, and the list's


def run(popen, command, text, **options):
    process = popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        **options,
    )
    output, _ = process.communicate(text)
    return process.returncode, output


def test_copy_that_is_killed_says_so_to_its_parent():
    process = runtime_server().popen(
        [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "0"], stderr=subprocess.DEVNULL
    )
    assert process.poll() is None
    assert os.getsid(process.pid) == os.getsid(0)
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL


def test_option_that_a_copy_would_ignore_is_refused():
    with pytest.raises(TypeError, match="process_group"):
        runtime_server().popen([sys.executable, "-m", "this"], process_group=0)
