"""Runs the device's part of a server plan: its head, its codecs and the request for its tail."""

import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from edgekit_runtime.codecs.media import MediaCodec, encode_media
from edgekit_runtime.errors import BackendError, CutError, DataError, RefusedInputError
from edgekit_runtime.offload.offload_plan import Compression, InputCodes, OffloadPlan
from edgekit_runtime.offload.offload_server import TailRequest, make_tail_request
from edgekit_runtime.offload.probe_schedule import BackOff
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.sessions.backends import open_choice
from edgekit_runtime.sessions.selftest import GoldenCase, read_golden
from edgekit_runtime.sessions.session import Session, cancel_runs
from edgekit_runtime.tensors import Array, TensorSpec

_GRID_VALUES: Final = 4096  # values of a channel checked against a fine grid. The range is checked for all
_COARSE_STEPS: Final = 96  # a coarse range has fewer: 64 of the samples, and a quarter of that on each side
_GRID_TOLERANCE: Final = 0.05  # share of a step: error of a preprocessing's roundings in float32


class PlanRunner:
    """A server plan that is ready to run.

    Attributes:
        plan: The plan. It has no compression if this device or the server does not support it.
        is_proved: Whether the server has answered the plan's golden inputs correctly.
        mismatch: What was wrong in the server's answer to the golden inputs, or an empty string.
        retry_s: The time on the monotonic clock before which the plan is not tried again.
        failure: Why the application's last request with this plan failed, or an empty string.
        back_off: The back-off after failed requests of the application. A successful request resets it.

    Raises:
        CutError: The head and the tail together do not compute all outputs of the model.
    """

    def __init__(self, plan: OffloadPlan, package: OpenedPackage, threads: int | None) -> None:
        self.plan, self._package, self._threads = plan, package, threads
        self.is_proved, self.mismatch, self.retry_s = False, "", -math.inf
        self.failure, self.back_off = "", BackOff()
        self._head: Session | None = None
        self._decoder: Session | None = None
        self._is_open = True
        self._lock = threading.Lock()
        tail_package = package
        for submodel in package.manifest.submodels:
            view = package.select_submodel(submodel.name)
            if view.manifest.name == plan.tail:
                tail_package = view
        self.inputs = tail_package.manifest.inputs
        self.outputs = tail_package.manifest.outputs
        self._tail_package = tail_package
        self._codecs = {name: MediaCodec.parse(codec) for name, codec in plan.media.items()}
        self._check_outputs()

    def carries(self, inputs: Mapping[str, Array]) -> bool:
        """Return whether the plan computes the same outputs as the whole model for these inputs.

        The result is False if an input has NaN, infinity or a value that the plan cannot encode in 8 bits.
        """
        return all(map(_is_finite, inputs.values())) and all(
            _fits(inputs[name], codes) for name, codes in self.plan.codes.items()
        )

    def open_head(self) -> Session | None:
        """Load the head and the decoder.

        Returns:
            The session of the head, or None if the plan has no head and sends the inputs unchanged.

        Raises:
            BackendError: `close` was called, or the engine refused the model.
            EngineMissingError: The engine is not installed.
        """
        with self._lock:
            if not self._is_open:
                raise BackendError("backend 'offload': the session is closed")
            # The decoder first: a head that is open says that the decoder is open too.
            if self._decoder is None and self.plan.decoder is not None:
                self._decoder = self._open(self.plan.decoder)
            if self._head is None and self.plan.head is not None:
                self._head = self._open(self.plan.head)
            return self._head

    def _open(self, name: str) -> Session:
        view = self._package.select_submodel(name)
        return open_choice(view, view.manifest.backend, self._threads)

    def run_head(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of the head, or an empty dict if the plan has no head."""
        head = self._head or self.open_head()
        return {} if head is None else head.run({spec.name: inputs[spec.name] for spec in head.inputs})

    def decode(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Return the outputs of a reply, with coded outputs decoded to values.

        Outputs without codes, for example those of a local run, are returned unchanged.
        """
        decoder = self._decoder
        if decoder is None or any(spec.name not in outputs for spec in decoder.inputs):
            return outputs
        return {**outputs, **decoder.run({spec.name: outputs[spec.name] for spec in decoder.inputs})}

    def encode(self, inputs: Mapping[str, Array], head_outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return a dict from the name of each input of the tail to its array.

        For an input that is sent as an image or audio file, the array is the file's content, uint8 [bytes].

        Raises:
            DataError: An input of the tail is missing, or an image or sound has more than one row.
            RefusedInputError: An array is not finite, so it is not sent.
        """
        sent = {}
        for spec in self.inputs:
            array = head_outputs[spec.name] if spec.name in head_outputs else inputs.get(spec.name)
            if array is None:
                raise DataError(f"plan '{self.plan.name}': nothing makes '{spec.name}', which its tail takes")
            if not _is_finite(array):
                raise RefusedInputError(
                    f"plan '{self.plan.name}': '{spec.name}' is not finite, so it is not sent"
                )
            codec = self._codecs.get(spec.name)
            sent[spec.name] = array if codec is None else _encode(codec, array)
        return sent

    def prepare(
        self,
        sent: Mapping[str, Array],
        outputs: tuple[TensorSpec, ...],
        *,
        compression: Compression,
        fields: str,
    ) -> TailRequest:
        """Return the request for the tail.

        Args:
            sent: A dict from the name of each input of the tail to its array.
            outputs: The outputs of the whole model. They are used only if the tail is the whole model.
            compression: The compression of the body.
            fields: Further header lines, each with its line ending.

        Raises:
            DataError: An array does not match its spec.
        """
        for spec in self.inputs:
            spec.check(sent[spec.name])
        expected = _bind(outputs if self._tail_package is self._package else self.outputs, self.inputs, sent)
        return make_tail_request(self.plan.tail or "", sent, expected, compression, fields)

    def read_golden(self) -> GoldenCase:
        """Return the golden case of the tail with its first row only, which identifies the package."""
        return replace(read_golden(self._tail_package), rows=())

    def prepare_golden(self, golden: GoldenCase, fields: str) -> TailRequest:
        """Return a request with golden inputs, which tests whether the server computes the tail correctly.

        `fields` holds further header lines, each with its line ending.
        """
        expected = _bind(self.outputs, self.inputs, golden.inputs)
        return make_tail_request(self.plan.tail or "", golden.inputs, expected, self.plan.compression, fields)

    def interrupt(self) -> None:
        for part in (self._head, self._decoder):
            if (interrupt := getattr(part, "interrupt", None)) is not None:
                interrupt()

    def cancel_runs(self) -> None:
        cancel_runs(self._head)
        cancel_runs(self._decoder)

    def close(self) -> None:
        """Close the head and the decoder. They cannot be opened again."""
        with self._lock:
            self._is_open = False
            for part in (self._head, self._decoder):
                if part is not None:
                    part.close()

    def _check_outputs(self) -> None:
        manifest, plan = self._package.manifest, self.plan
        parts = {submodel.name: {spec.name for spec in submodel.outputs} for submodel in manifest.submodels}
        local_outputs = parts.get(plan.head or "", set()) | parts.get(plan.decoder or "", set())
        if plan.escalation is None:
            local_outputs = local_outputs | {spec.name for spec in self.outputs}
        needed = {spec.name for spec in manifest.outputs}
        if plan.escalation is not None:
            needed.add(plan.escalation.output)
        if missing := sorted(needed - local_outputs):
            raise CutError(f"plan '{plan.name}' does not give {', '.join(missing)}; plan the model again")


def _is_finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _fits(array: Array, codes: InputCodes) -> bool:
    """Return whether values lie within the range of their codes, and on the grid if samples did.

    A fine grid is checked for some values of each channel, spread over it, which takes a tenth of the time: a
    value between two codes is off by at most half a step, and in other data most values are off. Half a step
    of a coarse grid is a large error, so all values are checked against that.
    """
    channels = [array] if len(codes.step) == 1 else list(np.moveaxis(array, codes.axis, 0))
    if len(channels) != len(codes.step) or not array.size:
        return not array.size
    for values, low, high, step in zip(channels, codes.lowest, codes.highest, codes.step, strict=True):
        beyond = step * (0.5 if codes.is_grid else 1.0)  # error that rounding may cause anyway
        if not (float(values.min()) >= low - beyond and float(values.max()) <= high + beyond):  # or NaN
            return False
        if codes.is_grid:
            is_coarse = high - low < _COARSE_STEPS * step
            stride = 1 if is_coarse else max(1, values.size // _GRID_VALUES) | 1  # odd: meets all columns
            positions = (values.reshape(-1)[::stride].astype(np.float64) - low) / step
            if float(np.abs(positions - np.rint(positions)).max()) > _GRID_TOLERANCE:
                return False
    return True


def _encode(codec: MediaCodec, array: Array) -> Array:
    if array.ndim > codec.rank:
        if len(array) != 1:
            raise DataError(f"{codec.name} takes one row a request, got {len(array)}")
        array = array[0]
    return np.frombuffer(encode_media(codec, array), np.uint8)


def _bind(
    outputs: tuple[TensorSpec, ...], inputs: tuple[TensorSpec, ...], sent: Mapping[str, Array]
) -> tuple[TensorSpec, ...]:
    """Return outputs with the sizes that their named dimensions have in the sent tensors."""
    sizes: dict[str, int] = {}
    for spec in inputs:
        for name, size in zip(spec.shape, sent[spec.name].shape, strict=False):
            if isinstance(name, str):
                sizes.setdefault(name, size)
    return tuple(
        TensorSpec(
            spec.name, spec.dtype, tuple(sizes.get(d, d) if isinstance(d, str) else d for d in spec.shape)
        )
        for spec in outputs
    )
