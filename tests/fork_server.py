"""Processes of the runtime and of the host that begin as copies of one that has imported what they need.

A start of `python -m MODULE` imports for 0.1 to 0.4 s of a processor, that of a command of the host for up to
2 s; a copy begins within milliseconds. It is a child of its caller as any other, with its own arguments,
environment, descriptors, import path and working folder, with its caller's limits, umask and signals; its
children begin in the same way. Python itself starts what a copy could not show, such as modules of other
folders. Tests of what a process imports or holds use `subprocess`, and so do those of what else differs: all
copies of a server have one hash seed, and a copy outlives the thread that started it, even where the kernel
was asked to end it with its parent (PR_SET_PDEATHSIG).

    caller        sends a request to its server, which has one thread, as a fork needs
    server        forks a process that forks the copy and ends
    caller        has become the parent of the orphan, see prctl(2), PR_SET_CHILD_SUBREAPER
"""

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.machinery
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from edgekit_runtime.system.child_process import child_environment

_PRELOADED: Final = (
    *("edgekit_runtime.cli", "edgekit_runtime.agent.agent", "edgekit_runtime.agent.execution.local_steps"),
    *("edgekit_runtime.agent.execution.step_child", "edgekit_runtime.agent.artifacts.deltas"),
    *("edgekit_runtime.trust.trust_store", "edgekit_runtime.trust.verifier_process", "tuf.ngclient.updater"),
    *("edgekit_runtime.sessions.opening.selftest_child", "edgekit_runtime.service.server", "onnxruntime"),
    *("edgekit_runtime.service.worker.__main__", "edgekit_runtime.service.streams.capture"),
    "edgekit_runtime.autotune.contest_child",
)
_HOST_PRELOADED: Final = (
    *("edgekit_cli.cli", "edgekit_cli.package_request", "edgekit_toolkit.pipeline.run"),
    *("edgekit_toolkit.report.files", "edgekit_toolkit.report.terminal", "edgekit_toolkit.report.page"),
    *("edgekit_toolkit.importers.pt2_child", "edgekit_cli.fleet.up", "edgekit_fleet.operations.running"),
    *("edgekit_fleet.manager.control_loop", "edgekit_fleet.web.server", "edgekit_fleet.web.app"),
    *("edgekit_fleet.broker.mosquitto", "edgekit_hil.benches.opening", "onnx", "onnxruntime", "pytest"),
)
_COPIED: Final = ("edgekit_runtime.", "tests.")  # the toolkit measures the memory of its children
_NO_COPIES: Final = "edgekit_toolkit.measurement."  # which measures its own memory
_PYTHON: Final = sys.executable
_PR_SET_CHILD_SUBREAPER: Final = 36
_FIRST_FREE: Final = 200  # above the descriptors that a process is given
_MAX_REQUEST_BYTES: Final = 1 << 17
_OPTIONS: Final = {
    *("stdin", "stdout", "stderr", "bufsize", "text", "encoding", "errors"),
    *("cwd", "env", "pass_fds", "start_new_session"),
}
# Python and libraries read these while they start.
_READ_AT_START: Final = ("PYTHON", "LANG", "LC_", "LD_", "MALLOC_", "OMP_", "OPENBLAS_", "MKL_", "TZ")
_RESTORED: Final = frozenset((signal.SIGPIPE, signal.SIGXFSZ))  # by `subprocess`
_LIMITS: Final = tuple(value for name, value in vars(resource).items() if name.startswith("RLIMIT_"))
# Of this process while no test has changed it: all its tests share a server.
_ENVIRONMENT: Final = dict(os.environ)
_ROOT: Final = Path(__file__).parents[1]
_FOLDERS: Final = ("device_runtime", "host", "toolkit", "offload", "fleet", "hil")
_IMPORTED: Final = {"/", str(_ROOT), *(str(_ROOT / folder) for folder in _FOLDERS)}  # "/" as for our children
_prctl = ctypes.CDLL(None).prctl
_STARTING: Final = threading.Lock()  # orphans become children of a process, whichever server it asks


class ForkServer:
    """A server of copies, and the process that uses it."""

    def __init__(
        self, channel: socket.socket, variables: Mapping[str, str], *, is_always_parent: bool = False
    ) -> None:
        """Use the server at the other end of a channel.

        Args:
            channel: of the kind SOCK_SEQPACKET.
            variables: the environment of a process that would start as the server did.
            is_always_parent: whether all orphans of this process become its children.
        """
        self._channel, self._is_always_parent = channel, is_always_parent
        self._variables = _read_at_start(variables)
        if is_always_parent:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Return the process id of a new child of this process."""
        with _STARTING:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
                answer = self._channel.recv(64)
            finally:
                if not self._is_always_parent:
                    _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise ChildProcessError("the server of copies has ended; its standard error says why")
        return int(answer)

    def popen(self, arguments: list[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start a process as `subprocess.Popen` would; `[sys.executable, "-m", MODULE, …]` as a copy.

        `env NAME=VALUE …` before it states more of its environment.
        """
        variables = dict(os.environ if options.get("env") is None else options["env"])
        command = list(arguments)
        if command[:1] == ["env"]:
            while len(command) > 1 and "=" in command[1]:
                variables.update([command.pop(1).split("=", 1)])
            command.pop(0)
        is_module = command[:2] == [_PYTHON, "-m"] and not command[2].startswith(_NO_COPIES)
        folder = os.path.abspath(options.get("cwd") or os.getcwd())  # noqa: PTH100, PTH109
        is_other = folder not in _IMPORTED and _may_matter(folder)
        if not is_module or is_other or _read_at_start(variables) != self._variables:
            return _Popen(arguments, **options)
        return _ForkedPopen(self, command, **{**options, "env": variables})


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a copy must share with its server.

    Of the import path these are the folders in which a module may be that was imported before.
    """
    read = {name: value for name, value in variables.items() if name.startswith(_READ_AT_START)}
    folders = {*_split_path(variables)} - {str(_ROOT)}
    own = (f"{sys.prefix}/", f"{sys.base_prefix}/")
    counted = (path for path in folders if not path.startswith(own) and _may_matter(path))
    read["PYTHONPATH"] = os.pathsep.join(sorted(counted))
    return read


def _may_matter(folder: str) -> bool:
    """Whether a folder is of the source tree, hides a module, or has one that Python itself imports."""
    others = [path for path in sys.path if path != folder]
    names = {entry.name.partition(".")[0] for entry in Path(folder).glob("*")}
    if names & {"sitecustomize", "usercustomize"}:
        return True
    specs = (importlib.machinery.PathFinder.find_spec(name, others) for name in names if name.isidentifier())
    return Path(folder).is_relative_to(_ROOT) or any(spec and spec.loader for spec in specs)


def _split_path(variables: Mapping[str, str]) -> list[str]:
    words = variables.get("PYTHONPATH", "").split(os.pathsep)
    return [os.path.abspath(word) for word in words if word]  # noqa: PTH100  # links stay links


_Popen: Final = subprocess.Popen


class _ForkedPopen(_Popen):
    def __init__(self, server: ForkServer, arguments: list[str], **options: Any) -> None:
        if others := options.keys() - _OPTIONS:
            raise TypeError(f"copies of a process ignore {', '.join(sorted(others))}")
        self._server = server
        super().__init__(arguments, **options)

    def _execute_child(self, *values: Any) -> None:
        """Start the process; the values are those of Python 3.10 to 3.13."""
        arguments, _, _, _, passed, folder, environment = values[:7]
        pipes, own_session = values[10:16], values[21]
        streams = pipes[0], pipes[3], pipes[5]
        standard = [pipe if pipe >= 0 else number for number, pipe in enumerate(streams)]
        request = {
            "arguments": arguments[2:],
            "folder": os.fspath(folder or os.getcwd()),  # noqa: PTH109
            "environment": dict(os.environ if environment is None else environment),
            "numbers": [0, 1, 2, *passed],
            "own_session": bool(own_session),
            **_describe_caller(),
        }
        try:
            self.pid = self._server.start(request, [*standard, *passed])
            self._child_created = True
        finally:
            cast("Any", self)._close_pipe_fds(*pipes)


def _describe_caller() -> dict[str, Any]:
    """Return what a process inherits from the thread that starts it."""
    status = Path("/proc/self/status").read_text()
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
    return {
        "umask": int(status.partition("Umask:")[2].split()[0], 8),
        "limits": [(kind, resource.getrlimit(kind)) for kind in _LIMITS],
        "ignored": [*{*ignored} - _RESTORED],
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }


@functools.cache
def runtime_server() -> ForkServer:
    """Return the server of this process, whose copies find no modules of ours but the runtime."""
    return ForkServer(_start_server(_FOLDERS[:1], _PRELOADED), _variables(_FOLDERS[:1]))


@functools.cache
def host_server() -> ForkServer:
    """Return the server of this process for `python -m edgekit_cli`, whose copies find all of ours."""
    return ForkServer(_start_server(_FOLDERS, _HOST_PRELOADED), _variables(_FOLDERS))


def popen_own(arguments: list[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a process as `subprocess.Popen` would; a child that this process's code starts is a copy."""
    is_ours = arguments[:2] == [_PYTHON, "-m"] and arguments[2].startswith(_COPIED)
    return (_own_server().popen if is_ours else _Popen)(arguments, **options)


@functools.cache
def _own_server() -> ForkServer:
    return ForkServer(_start_server(_FOLDERS[:1], _PRELOADED), _variables(_FOLDERS))


def _variables(folders: Sequence[str]) -> dict[str, str]:
    return {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(str(_ROOT / folder) for folder in folders)}


@functools.cache
def _start_server(folders: Sequence[str], modules: Sequence[str]) -> socket.socket:
    """Return the channel of a server that imported modules from folders; copies have paths of their own."""
    near, far = socket.socketpair(type=socket.SOCK_SEQPACKET)
    command = [_PYTHON, __file__, str(far.fileno()), *modules]
    with far:
        server = _Popen(command, env=_variables(folders), pass_fds=[far.fileno()])

    def end() -> None:
        near.close()
        server.kill()  # a process that was forked here may hold the channel open
        server.wait()

    atexit.register(end)
    return near


def _serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a copy for each request; in a copy, return its request and its descriptors."""
    while True:
        sent, descriptors, _, _ = socket.recv_fds(channel, _MAX_REQUEST_BYTES, 64)
        if not sent:
            os._exit(0)
        ready, write = os.pipe()
        parent = os.fork()
        if not parent:
            between, child = os.getpid(), os.fork()
            if child:
                os.write(write, str(child).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            channel.detach()  # its number is closed, and used for others
            return json.loads(sent), descriptors
        os.waitpid(parent, 0)
        channel.send(os.read(ready, 64))
        for descriptor in (ready, write, *descriptors):
            os.close(descriptor)


def _become(
    request: dict[str, Any], descriptors: list[int], own_paths: Sequence[str]
) -> socket.socket | None:
    """Be the process of a request; return a channel in the process that becomes its server.

    Args:
        own_paths: the import path of Python without that of the environment.
    """
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FIRST_FREE) for descriptor in descriptors]
    os.closerange(3, _FIRST_FREE)
    for descriptor, number in zip(moved, request["numbers"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request["own_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    paths = (os.getcwd(), *_split_path(os.environ), *own_paths)  # noqa: PTH109  # as `-m` does
    sys.path[:] = dict.fromkeys(paths)
    near, far = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if not os.fork():
        near.close()
        for number in request["numbers"]:
            if number != 2:  # its tracebacks show
                os.close(number)
        return far
    far.close()
    subprocess.Popen = ForkServer(near, child_environment(), is_always_parent=True).popen
    os.umask(request["umask"])
    for kind, limits in request["limits"]:
        if tuple(limits) != resource.getrlimit(kind):
            resource.setrlimit(kind, tuple(limits))
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    cast("Any", sys.stdout).reconfigure(line_buffering=os.isatty(1))
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    return None


def _main() -> None:
    sys.path.pop(0)  # the folder of this file
    own_paths = [path for path in sys.path if path not in _split_path(os.environ)]
    channel: socket.socket | None = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    warnings.filterwarnings("ignore", module="runpy")  # a module that runs was imported before
    for number in signal.valid_signals() - _RESTORED:
        if signal.getsignal(number) == signal.SIG_IGN:  # by the process that started this server
            signal.signal(number, signal.SIG_DFL)
    gc.freeze()
    while channel is not None:
        request, descriptors = _serve(channel)
        channel = _become(request, descriptors, own_paths)
    module, *arguments = request["arguments"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
