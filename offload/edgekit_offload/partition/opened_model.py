"""A model that is parsed and opened only once for all steps of planning.

Parsing a model of 100 MB, opening a session and running it take several seconds each.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
import onnx
import onnxruntime

from edgekit_offload.partition.source_model import SourceModel
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.measurement.job_runner import PAUSE_S
from edgekit_runtime.tensors import Array

Feeds: TypeAlias = Mapping[str, Array]
_WARMUP: Final = 2
_ROUNDS: Final = 5


class OpenedModel:
    """A model on this machine. Its session and other results are cached.

    Args:
        content: The ONNX model.
        run_s: The time of a run on this machine, or None to measure it.
    """

    def __init__(self, content: bytes, *, run_s: float | None = None) -> None:
        self.content = content
        self._run_s = run_s
        self._answers: tuple[Sequence[Feeds], list[Feeds]] | None = None

    @cached_property
    def proto(self) -> onnx.ModelProto:
        """The parsed model. It must not be modified."""
        return onnx.load_from_string(self.content)

    @cached_property
    def source(self) -> SourceModel:
        """The model, prepared for cutting.

        Raises:
            CutError: The model cannot be cut.
        """
        return SourceModel(self.content, self.proto)

    @cached_property
    def session(self) -> onnxruntime.InferenceSession:
        """A session on the processor of this machine.

        Raises:
            CutError: onnxruntime rejects the model.
        """
        return open_model(self.content)

    def run_seconds(self, feeds: Feeds) -> float:
        if self._run_s is None:
            self._run_s = median_s(lambda: self.session.run(None, dict(feeds)))
        return self._run_s

    def answers(self, samples: Sequence[Feeds]) -> list[Feeds]:
        if self._answers is None or self._answers[0] is not samples:
            self._answers = samples, [run_session(self.session, sample) for sample in samples]
        return self._answers[1]

    def record(self, tensors: Sequence[str], samples: Sequence[Feeds]) -> Iterator[list[Array]]:
        """For each sample, yield a list with the values of `tensors`, which may include inputs.

        Raises:
            CutError: The model does not run on a sample.
        """
        traced = onnx.ModelProto()
        traced.CopyFrom(self.proto)
        outputs = {value.name for value in traced.graph.output}
        written = [tensor for tensor in tensors if tensor not in samples[0]]
        traced.graph.output.extend(onnx.ValueInfoProto(name=name) for name in written if name not in outputs)
        session = open_model(traced.SerializeToString())
        for sample in samples:
            try:
                results = session.run(written, dict(sample)) if written else []
            except Exception as cause:  # onnxruntime's errors have no common base class of their own
                raise CutError(f"the model does not run on a sample: {cause}") from cause
            values = {**sample, **dict(zip(written, results, strict=True))}
            yield [np.asarray(values[tensor]) for tensor in tensors]


def open_model(
    model: bytes, settings: onnxruntime.SessionOptions | None = None
) -> onnxruntime.InferenceSession:
    """Return a session on this machine's processor. By default, threads do not wait in busy loops.

    Raises:
        CutError: onnxruntime rejects the model.
    """
    if settings is None:
        settings = onnxruntime.SessionOptions()
        # Threads of many sessions that wait in busy loops take the processor from each other.
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    except Exception as cause:  # its exceptions have no other common base
        raise CutError(f"onnxruntime refused the model: {cause}") from cause


def run_session(session: onnxruntime.InferenceSession, feeds: Feeds) -> dict[str, Array]:
    """Return the outputs of a session by name. Tensors in `feeds` that are not inputs are ignored."""
    names = [output.name for output in session.get_outputs()]
    own_feeds = {value.name: feeds[value.name] for value in session.get_inputs()}
    return dict(zip(names, session.run(names, own_feeds), strict=True))


def median_s(call: Callable[[], object]) -> float:
    """Return the median time of several calls on this machine in seconds.

    There is a pause before each call, as in the measurements of `Machine`. The first calls are ignored.
    """
    times = []
    for _ in range(_WARMUP + _ROUNDS):
        time.sleep(PAUSE_S)
        begin_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times[_WARMUP:])
