"""The onnxruntime backend, which runs ONNX models on the CPU, or on the GPU of a server (`ort_providers`).

Importing this module does not import onnxruntime. Inputs are not converted. External data is supported only
for submodels, whose weights are stored in the artifact of the whole model.
"""

import copy
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import BackendError, DataError, RefusedInputError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.fixed_work import has_fixed_work_onnx
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.package.member_names import find_name_problem
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.options import DECODE, read_options
from edgekit_runtime.sessions.ort_memory import lean_loading
from edgekit_runtime.sessions.ort_products import LOG_FATAL_ONLY, open_exact
from edgekit_runtime.sessions.ort_providers import (
    ON_PROCESSOR,
    PROCESSOR,
    ProviderList,
    choose_provider,
    describe_provider,
    open_on_gpu,
    report_wrong_results,
)
from edgekit_runtime.sessions.session import Session, check_specs
from edgekit_runtime.system.engines import MAX_THREADS, EngineMissingError
from edgekit_runtime.system.install_hint import install_command
from edgekit_runtime.system.mapped_file import parts
from edgekit_runtime.system.own_process import count_cores, trim_memory
from edgekit_runtime.system.resource_errors import check_lack
from edgekit_runtime.tensors import DTYPES, Array, TensorSpec

if TYPE_CHECKING:
    import onnxruntime

_logger = logging.getLogger(__name__)

WRONG_REWRITES: Final = ("Pad_Fusion",)
"""Rewrites of onnxruntime's optimiser that change a model's results. They are disabled in every session.

`Pad_Fusion` moves the zeros of a Pad into the MaxPool after it, which pads with the smallest value instead.
For negative inputs, onnxruntime 1.31.1 gives other results than ONNX. Packaging folds the Pad before a Conv
if the model has no such MaxPool.
"""

_NODE_FAILED: Final = "Non-zero status code returned while running"
_NOT_OF_INPUTS: Final = ("llocate memory", "bad_alloc", "bfc_arena", "terminate flag")
_SYSTEM_ERROR: Final = re.compile(r"system error number ([0-9]+)")  # in onnxruntime's errors on opening files
# onnxruntime names element types after C++ types.
_DTYPE_OF_TYPE: Final = {
    f"tensor({ {'float16': 'float16', 'float32': 'float', 'float64': 'double'}.get(name, name) })": name
    for name in DTYPES
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OrtOptions:
    """Options of onnxruntime for a model, in `backend.options` of a manifest.

    Attributes:
        threads: The number of threads per inference. None means one per core that the process may use.
        spinning: Whether idle threads wait in a busy loop. This reduces the latency, but keeps cores busy.
        arena: Whether the memory of activations is kept for the next run. Disable it if the size of
            activations varies strongly. See docs/explanation/memory.md for its effect on some models.
        optimise: Whether the graph is optimised when it is loaded. Disable it for a model that is already
            optimised. If disabled, 8-bit products saturate on x86 without VNNI, see `ort_products`.
        fold_weights: Whether quantized weights are dequantized once when the model is loaded. Enable it for
            models that compute in float. Otherwise onnxruntime dequantizes them in every inference, which
            takes 1.1 to 5 times as long.
        narrow_weights: Whether 8-bit weights use only 7-bit codes. Then the fast kernels are exact on all
            processors, see `ort_products`.
        disabled_optimizers: The names of onnxruntime optimizers to disable because they change the results of
            this model. `WRONG_REWRITES` are disabled for all models.
        weights: The path of the artifact with the weights of a submodel. The graph refers to this path. None
            for a model that contains its weights.
    """

    threads: Annotated[int | None, Range(1, MAX_THREADS)] = None
    spinning: bool = False
    arena: bool = True
    optimise: bool = True
    fold_weights: bool = False
    narrow_weights: bool = False
    disabled_optimizers: tuple[str, ...] = ()
    weights: str | None = None


class OrtSession:
    """A model in onnxruntime.

    Attributes:
        provider: `cpu`, or the GPU provider that runs the model, see `ort_providers`.
        inputs: The specifications of the inputs. Unnamed free dimensions are named by input and axis, such as
            `image_0`.
        outputs: The specifications of the outputs.
        has_fixed_work: Whether the duration of a run does not depend on the input values, see `fixed_work`.
        is_concurrent: Whether several threads can call `run` at once. It is always True.
    """

    is_concurrent: ClassVar[bool] = True

    def __init__(
        self,
        model: bytes | memoryview | Path,
        options: OrtOptions | None = None,
        weights: bytes | memoryview = b"",
        provider: str = PROCESSOR,
    ) -> None:
        """Load a model.

        Args:
            model: The content or path of an ONNX model.
            options: The options of onnxruntime for the model. The default is `OrtOptions()`.
            weights: The content of the artifact `options.weights`. It is not needed after loading.
            provider: The provider to run the model. If it does not work, the CPU is used.

        Raises:
            EngineMissingError: onnxruntime is not installed.
            BackendError: onnxruntime refused the model, or an input or output is not a plain tensor.
            UnavailableError: The system is out of memory or file descriptors.
        """
        session = _load(model, options or OrtOptions(), weights, provider)
        self.provider = provider if len(session.get_providers()) > len(ON_PROCESSOR) else PROCESSOR
        self._settings = _make_run_settings()
        self.has_fixed_work = False
        self._session: onnxruntime.InferenceSession | None = session
        # The compiled session under the public one, whose `run` in Python takes a tenth of a short model's
        # time for checks that are made here too. If there is none, the public one has the same interface.
        self._run: Callable[..., list[Array]] | None = getattr(session, "_sess", session).run
        self.inputs: tuple[TensorSpec, ...] = tuple(_read_spec(node) for node in session.get_inputs())
        self.outputs: tuple[TensorSpec, ...] = tuple(_read_spec(node) for node in session.get_outputs())
        self._names = frozenset(spec.name for spec in self.inputs)
        self._checks = tuple((spec.name, spec.check) for spec in self.inputs)
        self._output_names = [spec.name for spec in self.outputs]

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if inputs.keys() != self._names:
            raise DataError(f"got inputs {sorted(inputs)}, expected {sorted(self._names)}")
        for name, check in self._checks:
            check(inputs[name])
        run = self._run
        if run is None:
            raise BackendError("backend 'ort': the session is closed")
        try:
            # onnxruntime accepts only a dict.
            values = run(self._output_names, inputs if type(inputs) is dict else dict(inputs), self._settings)
        except Exception as cause:  # its exceptions have no other common base
            kind = RefusedInputError if _blames_inputs(str(cause)) else BackendError
            raise kind(f"backend 'ort': running the model failed: {cause}") from cause
        return dict(zip(self._output_names, values, strict=True))

    def trim(self, inputs: Mapping[str, Array]) -> None:
        """Return the memory of earlier runs to the system. After `close`, do nothing.

        onnxruntime does this at the end of a run, so the model runs once more with `inputs`.
        The memory for the outputs of this run is not returned.

        Raises:
            BackendError: onnxruntime failed, and no memory was returned.
        """
        run = self._run
        if run is None:
            return
        settings = _make_run_settings()
        settings.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        try:
            run(self._output_names, dict(inputs), settings)
        except Exception as cause:
            raise BackendError(f"backend 'ort': running the model failed: {cause}") from cause
        trim_memory()

    def share(self) -> "OrtSession":
        """Return another session of the loaded model, with its own `interrupt`, `cancel_runs` and `close`."""
        shared = copy.copy(self)
        shared._settings = _make_run_settings()
        return shared

    def interrupt(self) -> None:
        """Stop the current runs with an error at their next node.

        Later runs fail too. Any thread may call this.
        """
        self._settings.terminate = True

    def cancel_runs(self) -> None:
        """Stop the current runs with an error at their next node. Later runs are not affected."""
        settings, self._settings = self._settings, _make_run_settings()
        self._settings.terminate = settings.terminate  # after `interrupt`
        settings.terminate = True

    def close(self) -> None:
        """Free the model after the current runs have ended. Further calls do nothing."""
        self._session = self._run = None


def _blames_inputs(message: str) -> bool:
    """Return whether onnxruntime's message says that a node refused its inputs.

    Messages about a lack of memory, or about a run that `interrupt` stopped, have the same form.
    """
    return _NODE_FAILED in message and not any(word in message for word in _NOT_OF_INPUTS)


def open_ort(package: OpenedPackage, choice: BackendChoice, threads: int | None) -> OrtSession:
    """Return a session of the artifact that `choice` names, see `OpenBackend`.

    A session on a GPU must pass the self-test of the package. Otherwise a session on the CPU is returned.

    Raises:
        EngineMissingError: onnxruntime is not installed.
        BackendError: An option is invalid, onnxruntime refused the model, or the inputs or outputs differ
            from the manifest.
        PackageError: The package does not have the artifact in the option `weights`.
        UnavailableError: The system is out of memory or file descriptors.
    """
    options = read_options(OrtOptions, "ort", choice.options, threads)
    weights = b"" if options.weights is None else package.read(options.weights)
    model = package.read(choice.artifact)
    session = OrtSession(model, options, weights, choose_provider())
    if session.provider != PROCESSOR:
        if fault := _find_fault(session, package, choice):
            report_wrong_results(session.provider, fault)
            session.close()
            session = OrtSession(model, options, weights)
        else:
            _logger.info("%s runs on %s", package.manifest.name, describe_provider(session.provider))
    session.has_fixed_work = has_fixed_work_onnx(model)
    check_specs(session, package, choice)
    return session


def _find_fault(session: OrtSession, package: OpenedPackage, choice: BackendChoice) -> str:
    """Return why the session fails the self-test, or an empty text."""
    from edgekit_runtime.sessions.selftest import run_selftest  # decoders of tasks, which not all need

    try:
        tested: Session = session
        if DECODE in choice.options:  # its golden inputs are files
            from edgekit_runtime.sessions.media import MediaSession

            tested = MediaSession(session, choice.options[DECODE])
        checks = run_selftest(tested, package).checks
    except (BackendError, DataError) as cause:
        return str(cause)
    return next((check.message for check in checks if not check.passed), "")


def _load(
    model: bytes | memoryview | Path, options: OrtOptions, weights: bytes | memoryview, provider: str
) -> "onnxruntime.InferenceSession":
    try:
        import onnxruntime  # noqa: F401  # separately: a missing engine is no refusal
    except ImportError as cause:
        raise EngineMissingError(
            f"backend 'ort' needs onnxruntime ({cause}): {install_command('device')}"
        ) from cause
    try:
        settings = make_settings(options)
        if isinstance(model, Path):
            return create_session(str(model), settings, options, provider)
        # onnxruntime copies bytes and keeps both copies; it reads a file in memory once. For a model of 18.6
        # MB that is 46 MB instead of 82 MB after loading.
        with ExitStack() as stack:
            path = stack.enter_context(_memory_file(model))
            if options.weights is not None:
                path = stack.enter_context(with_weights(path, options.weights, weights, settings))
            return create_session(path, settings, options, provider)
    except Exception as cause:  # its exceptions have no other common base
        check_lack(cause, "backend 'ort': the model cannot be given to onnxruntime")
        if match := _SYSTEM_ERROR.search(str(cause)):
            number = int(match[1])
            check_lack(OSError(number, os.strerror(number)), "backend 'ort': the model cannot be read")
        raise BackendError(f"backend 'ort': onnxruntime refused the model: {cause}") from cause


@contextmanager
def _memory_file(content: bytes | memoryview) -> Iterator[str]:
    """Yield the path of a file in memory, which exists within the `with` block."""
    descriptor = os.memfd_create("model", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb") as file:
        file.writelines(parts(content))
        file.flush()
        yield f"/proc/self/fd/{descriptor}"


@contextmanager
def with_weights(
    path: str, name: str, weights: bytes | memoryview, settings: "onnxruntime.SessionOptions"
) -> Iterator[str]:
    """Yield a path at which a graph with external weights can be opened. The graph cannot read other files.

    Args:
        path: The path of the graph.
        name: The name by which the graph refers to its external data.
        weights: The content of the external data.
        settings: The options of the session, which are changed in place.

    Raises:
        BackendError: `name` is not a valid path of an artifact.
    """
    if hasattr(settings, "add_external_initializers_from_files_in_memory"):
        settings.add_external_initializers_from_files_in_memory([name], [weights], [len(weights)])
        yield path
        return
    # onnxruntime accepts them in memory from 1.24.1 on. 1.23.2, the last for Python 3.10, and older releases
    # look beside the file of the graph, also through links, which newer ones refuse.
    if find_name_problem(name) is not None:
        raise BackendError(f"backend 'ort': the option weights is {name!r}, expected the path of an artifact")
    import tempfile  # the service imports nothing that it does not use

    with tempfile.TemporaryDirectory(prefix="edgekit-submodel-") as folder, _memory_file(weights) as content:
        link = Path(folder, "weights", name)
        link.parent.mkdir(parents=True)
        link.symlink_to(content)
        graph = Path(folder, "weights", "_graph.onnx")
        graph.symlink_to(path)
        yield str(graph)


def make_settings(options: OrtOptions) -> "onnxruntime.SessionOptions":
    """Return the settings for `options`. Ignore `disabled_optimizers`, `narrow_weights` and `weights`.

    Raises:
        ImportError: onnxruntime is not installed.
    """
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = LOG_FATAL_ONLY
    settings.intra_op_num_threads = options.threads or _count_allowed()
    settings.inter_op_num_threads = 1
    # With memory patterns, the first run allocates activations one by one, later runs allocate one block, and
    # the arena keeps both. Weights are not in the arena, so loading leaves no holes in it.
    settings.enable_mem_pattern = False
    settings.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    settings.enable_cpu_mem_arena = options.arena
    settings.add_session_config_entry("session.intra_op.allow_spinning", "1" if options.spinning else "0")
    if options.fold_weights:
        # Then DequantizeLinear of a constant is folded like other constants, not kept for integer kernels.
        settings.add_session_config_entry("session.disable_quant_qdq", "1")
    level = onnxruntime.GraphOptimizationLevel
    settings.graph_optimization_level = level.ORT_ENABLE_ALL if options.optimise else level.ORT_DISABLE_ALL
    return settings


def _count_allowed() -> int:
    """Return the number of processors that this process may use, or 0 for all, which onnxruntime counts.

    onnxruntime counts the cores of the machine. If a container may only use some of them, its threads would
    wait for each other at each kernel. Small models took 1.4 to 3 times as long.
    """
    allowed = count_cores()
    return allowed if allowed < (os.cpu_count() or 1) else 0


def _make_run_settings() -> "onnxruntime.RunOptions":
    import onnxruntime

    settings = onnxruntime.RunOptions()
    settings.log_severity_level = LOG_FATAL_ONLY
    return settings


def create_session(
    path: str, settings: "onnxruntime.SessionOptions", options: OrtOptions, provider: str = PROCESSOR
) -> "onnxruntime.InferenceSession":
    """Return onnxruntime's own session of a model.

    Args:
        path: The path of an ONNX model.
        settings: The result of `make_settings` for `options`. It is changed in place.
        options: The options of the model.
        provider: The provider to try. If it does not work, the CPU is used.

    Raises:
        Exception: An error of onnxruntime, whose errors have no common base class.
    """
    import onnxruntime

    def create(
        settings: "onnxruntime.SessionOptions", providers: ProviderList = ON_PROCESSOR
    ) -> "onnxruntime.InferenceSession":
        # No fallback of onnxruntime's own to other providers: it prints to the standard output.
        return onnxruntime.InferenceSession(
            path,
            settings,
            providers=list(providers),
            enable_fallback=0,
            disabled_optimizers=[*WRONG_REWRITES, *options.disabled_optimizers],
        )

    with lean_loading():
        if provider != PROCESSOR:
            on_gpu = open_on_gpu(provider, lambda providers: create(settings, providers))
            if on_gpu is not None:
                return on_gpu
        return open_exact(settings, create, is_narrow=options.narrow_weights)


def _read_spec(node: "onnxruntime.NodeArg") -> TensorSpec:
    dtype = _DTYPE_OF_TYPE.get(node.type)
    if dtype is None:
        raise BackendError(f"backend 'ort': '{node.name}' is a {node.type}, which is no plain tensor")
    # A dimension without a name may also have any size; it is named after its place.
    shape = (f"{node.name}_{axis}" if size is None else size for axis, size in enumerate(node.shape))
    return TensorSpec(node.name, dtype, tuple(shape))
