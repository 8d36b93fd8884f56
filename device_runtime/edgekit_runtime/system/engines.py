"""The record of an engine, and the table of the engines that are registered.

Each engine has a module in `edgekit_runtime.engines` that makes its record and registers it. Another
distribution offers the record of its engine as an entry point of the group `edgekit.backends`. All code that
depends on an engine asks the record; none compares its name.

A record's module imports no engine. The functions in the record do that when they are called, since a device
has one or two engines, and each takes memory:

    register(Engine(name="ort", installation=Installation(modules=("onnxruntime",)), open=_open, …))
    find_engine(choice.name).open(package, choice, threads)     # this imports onnxruntime
"""

import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError
from edgekit_runtime.records import dataclass

MAX_THREADS: Final = 256
"""Most threads of one inference. A higher number is refused, not lowered: a package means the same on each
machine. More threads help no device, and a few thousand fill the table of threads of all its programs."""
ENTRY_POINT_GROUP: Final = "edgekit.backends"
SettingsToTry = list[dict[str, JsonValue]]


class EngineMissingError(BackendError):
    """The engine of a backend is unknown or cannot be imported; another backend may be tried."""


def _nothing_to_tune(_threads: Sequence[int]) -> SettingsToTry:
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """How an engine comes onto a device.

    Attributes:
        modules: Python packages of the engine; any one is enough.
        distributions: its names in package indexes, the usual one first.
        extra: extra of our distribution that installs the engine; empty if `advice` says how.
        advice: how to install it if no extra does.
        host_extra: extra for hosts that make packages for the engine; empty if they need none.
        pinned_list: file in `requirements/` with pinned versions for a device; empty if there is none.
    """

    modules: tuple[str, ...]
    distributions: tuple[str, ...] = ()
    extra: str = ""
    advice: str = ""
    host_extra: str = ""
    pinned_list: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether one of the Python packages is here; it may still fail to import."""
        return any(_is_there(module) for module in self.modules)

    @property
    def missing_text(self) -> str:
        """What the engine needs and how to install it: `needs …; pip install …`."""
        from edgekit_runtime.system.install_hint import install_command  # only for this text

        return f"needs {' or '.join(self.modules)}; {self.advice or install_command(self.extra)}"

    def find_release(self) -> tuple[str, str]:
        """Import the engine; return name and version of its package, such as `onnxruntime` and `1.24.4`.

        Raises:
            EngineMissingError: none of its packages can be imported.
        """
        fault = ""
        for module in self.modules:
            if not _is_there(module):
                continue
            try:
                version = getattr(importlib.import_module(module), "__version__", None)
            except (ImportError, OSError) as cause:  # the next one may work
                fault = f" ({cause})"
                continue
            name = module.replace("_", "-")
            return name, str(version or find_version((name, *self.distributions)))
        raise EngineMissingError(f"this {self.missing_text}{fault}")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that the module is in
        return False


def find_version(distributions: Sequence[str]) -> str:
    """Return the version of the first distribution that is installed, or an empty text."""
    from importlib.metadata import PackageNotFoundError, version  # takes 10 ms and a megabyte

    for distribution in distributions:
        with contextlib.suppress(PackageNotFoundError):
            return version(distribution)
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What the project knows about an engine and its backend.

    Attributes:
        name: name of the backend in manifests.
        title: name for people.
        installation: how it comes onto a device.
        file_format: `onnx`, `tflite`, or empty if the engine gets packages from `edgekit offload` only.
        platform: the format as the Open Inference Protocol names it; empty if it has no name there.
        open_model: opens a model from its content (bytes or a view), options as in a manifest, and a number
            of threads or None. The field is None if the engine opens only models of packages.
        open: opens a package's model, see `sessions.OpenBackend`; None if `open_model` is used for that.
        tuning_options: returns the options to try for some numbers of threads; no option may change results.
        builds_for_s: longest time to build a model on the device before it can run, seconds; 0 for none.
        on_gpu: whether it computes on a GPU; then runs on a processor say nothing about its kernels.
        can_stop_runs: whether its sessions have `cancel_runs`.
        shares_model: whether its sessions are `is_concurrent`, so that one serves several runs at once.
    """

    name: str
    title: str
    installation: Installation
    file_format: str = ""
    platform: str = ""
    open_model: Callable[..., Any] | None = None
    open: Callable[..., Any] | None = None
    tuning_options: Callable[[Sequence[int]], SettingsToTry] = _nothing_to_tune
    builds_for_s: float = 0.0
    on_gpu: bool = False
    can_stop_runs: bool = False
    shares_model: bool = False

    @property
    def tunable(self) -> frozenset[str]:
        """The names of the options that tuning may set."""
        return frozenset(option for setting in self.tuning_options([1]) for option in setting)


ENGINES: Final[dict[str, Engine]] = {}
"""Name -> the record of a registered engine."""


def register(engine: Engine) -> Engine:
    """Add an engine's record to the table, or replace the one of that name; return the record."""
    ENGINES[engine.name] = engine
    return engine


def find_engine(name: str) -> Engine:
    """Return the record of an engine, registered here or found by an entry point.

    Raises:
        EngineMissingError: there is none, or its module cannot be imported.
    """
    if name in ENGINES:
        return ENGINES[name]
    from importlib.metadata import entry_points  # takes 10 ms and a megabyte, which few need

    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        if entry_point.name != name:
            continue
        try:
            engine = entry_point.load()
        except Exception as cause:
            raise EngineMissingError(f"backend '{name}' ({entry_point.value}): {cause}") from cause
        if not isinstance(engine, Engine):
            raise EngineMissingError(
                f"backend '{name}': {entry_point.value} is no `edgekit_runtime.system.engines.Engine`"
            )
        return engine
    raise EngineMissingError(
        f"no backend '{name}' here; install a distribution that offers the entry point '{name}' in the group"
        f" '{ENTRY_POINT_GROUP}', or a package with a backend that is here ({', '.join(ENGINES)})"
    )


def get_engine(name: str) -> Engine | None:
    """Return the record of an engine, or None if the engine is unknown here."""
    with contextlib.suppress(EngineMissingError):
        return find_engine(name)
    return None


def parse_engine(release: str) -> Engine:
    """Return the engine of a release such as `onnxruntime 1.24.4`; the version is ignored.

    Raises:
        EngineMissingError: no registered engine has such a package.
    """
    package = release.partition(" ")[0]
    for engine in ENGINES.values():
        if package in engine.installation.distributions:
            return engine
    titles = ", ".join(engine.title for engine in ENGINES.values())
    raise EngineMissingError(f"'{release}' is no release of an engine ({titles})")


def list_registered() -> tuple[Engine, ...]:
    return tuple(ENGINES.values())


def list_engines() -> tuple[str, ...]:
    """Return the names of the registered backends with an installed engine."""
    return tuple(sorted(engine.name for engine in ENGINES.values() if engine.installation.is_complete))


def check_backends(backends: Sequence[str], where: str) -> None:
    """Check that an engine is installed here for one of `backends`.

    This does not detect an installed engine that cannot be imported. `where`: start of the message.

    Raises:
        EngineMissingError: no engine is installed; the message says what to install for each.
    """
    lacks = [_find_lack(backend) for backend in backends]
    if all(lacks):
        raise EngineMissingError(f"{where}: no engine for it is installed here: {'; or '.join(lacks)}")


def _find_lack(backend: str) -> str:
    """Return what to install for a backend, or an empty text."""
    try:
        engine = find_engine(backend)
    except EngineMissingError as cause:
        return str(cause)
    installation = engine.installation
    return "" if installation.is_complete else f"backend '{backend}' {installation.missing_text}"
