"""The real device of the demo: the service and agent as processes, and an application that uses them."""

import threading
import time
from pathlib import Path
from typing import Final

import numpy as np

from edgekit_runtime.client.client import Client
from edgekit_runtime.client.control import is_listening
from edgekit_runtime.errors import EdgekitError, TransportError
from edgekit_runtime.system.child_process import ChildProcess

_MODULE: Final = "edgekit_fleet.demo.device_process"
_START_S: Final = 300.0  # a process that ends is noticed at once
_POLL_S: Final = 0.05
# A trial of a few seconds: each call is copied, and faults that show only after thousands of calls are not
# tested.
_SERVICE: Final = """\
[models.{model}]
shadow = {{share = 1.0, comparison = "agreement"}}
[models.{model}.gates]
min_samples = 100
max_extra_errors = 0.05
max_p50_ratio = 0
max_p99_ratio = 0
max_duration_s = 20
"""


class RealDevice:
    """The real device of the demo. Its processes end with `close`, or with this process."""

    def __init__(self, folder: Path, model: str, target: str) -> None:
        runtime = folder / "run"
        (runtime / "edgekit").mkdir(parents=True)
        self.socket_path = runtime / "edgekit" / "edgekit.sock"
        self._configuration = folder / "service.toml"
        self._configuration.write_text(_SERVICE.format(model=model), encoding="utf-8")
        self._variables = {
            "EDGEKIT_HOME": str(folder / "home"),
            "EDGEKIT_STATE": str(folder / "state"),
            "EDGEKIT_CACHE": str(folder / "cache"),
            "EDGEKIT_TARGET": target,
            "XDG_RUNTIME_DIR": str(runtime),
            "RUNTIME_DIRECTORY": "",
        }
        self._processes: dict[str, ChildProcess] = {}

    def join(self, code: str) -> None:
        """Enrol with a one-time code, and start the service and the agent.

        Raises:
            TransportError: A process ended, or did not start in time.
        """
        with self._start("enroll", "--code", code) as process:
            if process.wait(_START_S) != 0:
                raise TransportError(f"the real device cannot enrol: it ended {process.explain_end()}")
        service = ("serve", "--port", "0", "--config", str(self._configuration))
        self._processes["service"] = self._start(*service)
        limit = time.monotonic() + _START_S
        while not is_listening(self.socket_path):
            self.check()
            if time.monotonic() > limit:
                raise TransportError(f"the real device's service was not ready in {_START_S:.0f} s")
            time.sleep(_POLL_S)
        self._processes["agent"] = self._start("agent")

    def check(self) -> None:
        """Check that the service and the agent are running.

        Raises:
            TransportError: One of them has ended.
        """
        for name, process in self._processes.items():
            if process.wait(0) is not None:
                raise TransportError(f"the real device's {name} ended {process.explain_end()}")

    def close(self) -> None:
        """End the processes of the device."""
        for process in reversed(self._processes.values()):
            process.close()

    def _start(self, *arguments: str) -> ChildProcess:
        return ChildProcess(_MODULE, *arguments, variables=self._variables, own_session=True)


class Application:
    """Calls the model of a device from a thread, and counts the answers.

    Attributes:
        calls, failed, right: The numbers of all calls, of calls without an answer, and of calls with the
            right class.
    """

    def __init__(self, socket_path: Path, model: str, calls: Path, *, pause_s: float = 0.008) -> None:
        """Read the inputs. Calls begin with `start`.

        Args:
            socket_path: The socket of the service.
            model: The name of the model.
            calls: An .npz of one input and `classes`.
            pause_s: The pause between two calls.
        """
        with np.load(calls) as arrays:
            self._classes = arrays["classes"]
            ((self._input, self._points),) = ((key, arrays[key]) for key in arrays.files if key != "classes")
        self.calls = self.failed = self.right = 0
        self._path, self._model, self._pause_s = socket_path, model, pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="application", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop calling, and wait for a running call to end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        with Client(str(self._path)) as client:
            while not self._stop.wait(self._pause_s):
                number = self.calls % len(self._points)
                self.calls += 1
                try:
                    (scores,) = client.infer(
                        self._model, {self._input: self._points[number : number + 1]}
                    ).values()
                except EdgekitError:
                    self.failed += 1
                else:
                    self.right += int(scores.argmax() == self._classes[number])
