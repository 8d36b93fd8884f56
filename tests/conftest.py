"""What holds for every test: no telemetry, no engine is fetched, and time decides nothing."""

import faulthandler
import gc
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator

# Before numpy is imported: threads of BLAS wait in a busy loop, which takes the processor from other tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

import edgekit_runtime  # noqa: F401  # switches telemetry off, before a test imports onnxruntime
from tests.browser import browser, page, tabs  # noqa: F401  # fixtures
from tests.fork_server import host_server, popen_own

os.environ.setdefault("EDGEKIT_DEVICE_ENGINES", "off")
os.environ["EDGEKIT_BRIEF"] = "times,memory,races"  # of measurements, also in child processes
_HANGS_AFTER_S = 300.0  # as faulthandler_timeout in pyproject.toml
_REARM_S = 30.0  # a timer is started at most this often, and waits as much longer
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", _UNTIMED)
settings.register_profile("short", _UNTIMED, max_examples=40)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the long run."""
    parser.addoption("--long", action="store_true", help="run also what CONTRIBUTING lists as the long run")


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples where a test names no number of them, but for the long run."""
    settings.load_profile("long" if config.getoption("--long") else "short")
    if not float(config.getini("faulthandler_timeout") or 0):
        config.pluginmanager.register(HangingTests(), "hanging tests")


class HangingTests:
    """Ends a process whose test hangs, and shows where: a timer for many tests, unlike that of pytest."""

    def __init__(self) -> None:
        self.stderr = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)
        self.armed_s = -_REARM_S

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self,
    ) -> None:  # where the test runs: the process that waits for others has no timer
        if time.monotonic() - self.armed_s >= _REARM_S:
            faulthandler.dump_traceback_later(_HANGS_AFTER_S + _REARM_S, exit=True, file=self.stderr)
            self.armed_s = time.monotonic()

    def pytest_sessionfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def is_long(pytestconfig: pytest.Config) -> bool:
    """Whether this is the long run."""
    return bool(pytestconfig.getoption("--long"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long run to its option, and begin with the files of few tests: they have the longest ones."""
    if not config.getoption("--long"):
        long = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: counts[item.path])


@pytest.fixture(scope="module", autouse=True)
def same_environment() -> Iterator[None]:
    """Leave the next file the environment from before this one; cv2 adds to it when it is imported."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def copied_children() -> Iterator[None]:
    """Let children that our code starts in this process, such as workers, be copies that need no imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen_own)
        yield


@pytest.fixture(scope="module")
def copied_commands() -> Iterator[None]:
    """Let commands of the host that our code starts in this process be copies that need no imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", host_server().popen)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and leave them and all modules out of it afterwards.

    Each process of a run imports and collects all: that took it a second more, and each garbage collection
    0.3 s. A test allocates little that counting does not free.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()
