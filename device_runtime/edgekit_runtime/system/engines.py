"""The registry of engines, with one record for each engine.

Each engine has a module in `edgekit_runtime.engines` that registers its record. Other distributions provide
records as entry points of the group `edgekit.backends`. Other code uses the properties in a record, and does
not compare the name of the engine.

The module of a record does not import the engine, because each engine takes memory. The functions in the
record import it when they are called:

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
"""The maximum threads of an inference. A higher number is refused, so that a package means the same
everywhere. More threads are not faster, and a few thousand exhaust the system's limit."""
ENTRY_POINT_GROUP: Final = "edgekit.backends"
SettingsToTry = list[dict[str, JsonValue]]


class EngineMissingError(BackendError):
    """The engine of a backend is unknown or cannot be imported. Another backend may work."""


def _nothing_to_tune(_threads: Sequence[int]) -> SettingsToTry:
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """How to install an engine on a device.

    Attributes:
        modules: The Python packages of the engine. Any one of them is enough.
        distributions: The names of the engine's packages in package indexes, the usual one first.
        extra: The extra of edgekit that installs the engine, or empty.
        advice: How to install the engine if there is no extra.
        host_extra: The extra for hosts that create packages for the engine, or empty.
        pinned_list: The file in `requirements/` with pinned versions for a device, or empty.
    """

    modules: tuple[str, ...]
    distributions: tuple[str, ...] = ()
    extra: str = ""
    advice: str = ""
    host_extra: str = ""
    pinned_list: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether one of the Python packages is installed. Its import may still fail."""
        return any(_is_there(module) for module in self.modules)

    @property
    def missing_text(self) -> str:
        """A text for messages, such as `needs onnxruntime; pip install …`."""
        from edgekit_runtime.system.install_hint import install_command  # only for this text

        return f"needs {' or '.join(self.modules)}; {self.advice or install_command(self.extra)}"

    def find_release(self) -> tuple[str, str]:
        """Import the engine. Return the name and version of its package, such as `onnxruntime` and `1.24.4`.

        Raises:
            EngineMissingError: None of the packages can be imported.
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
    """Return the version of the first distribution that is installed, or an empty string."""
    from importlib.metadata import PackageNotFoundError, version  # takes 10 ms and a megabyte

    for distribution in distributions:
        with contextlib.suppress(PackageNotFoundError):
            return version(distribution)
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The properties of an engine and its backend.

    Attributes:
        name: The name of the backend in manifests.
        title: The name for users.
        installation: How to install the engine.
        file_format: `onnx`, `tflite`, or empty if only `edgekit offload` makes packages for the engine.
        platform: The name of the format in the Open Inference Protocol, or empty.
        open_model: Opens a model from its content (bytes or a view), the options in a manifest, and a number
            of threads or None. None if the engine only opens models of packages.
        open: Opens the model of a package, see `sessions.OpenBackend`. None if `open_model` does that.
        tuning_options: Takes the numbers of threads to try and returns the options to measure. They must
            not change the outputs of a model.
        builds_for_s: The maximum time in seconds to build a model on the device. 0 if nothing is built.
        on_gpu: Whether the engine computes on a GPU.
        can_stop_runs: Whether the sessions have `cancel_runs`.
        shares_model: Whether one session can run several requests at the same time (`is_concurrent`).
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
"""A dict from names to registered engines."""


def register(engine: Engine) -> Engine:
    """Add a record to the registry, replacing any record of the same name. Return it."""
    ENGINES[engine.name] = engine
    return engine


def find_engine(name: str) -> Engine:
    """Return the record of an engine that is registered or provided by an entry point.

    Raises:
        EngineMissingError: There is no such engine, or its module cannot be imported.
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
    """Return the record of an engine, or None if `find_engine` does not find it."""
    with contextlib.suppress(EngineMissingError):
        return find_engine(name)
    return None


def parse_engine(release: str) -> Engine:
    """Return the engine of a release such as `onnxruntime 1.24.4`. The version is ignored.

    Raises:
        EngineMissingError: The release does not belong to a registered engine.
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
    """Return the names of the registered backends whose engine is installed."""
    return tuple(sorted(engine.name for engine in ENGINES.values() if engine.installation.is_complete))


def check_backends(backends: Sequence[str], where: str) -> None:
    """Check that an engine is installed for one of `backends`.

    An installed engine may still fail to import. The message of an error starts with `where`.

    Raises:
        EngineMissingError: No engine is installed. The message says what to install for each backend.
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
