"""A copy of an answered request, and its conversion to a sample."""

import base64
import io
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.preprocessing.wav import pack_wav
from edgekit_runtime.protocol.samples import (
    MAX_ANSWER_BYTES,
    Sample,
    SampleHeader,
    SampleTensor,
    sample_info,
    write_sample,
)
from edgekit_runtime.records import dataclass
from edgekit_runtime.samples.draws import Selection
from edgekit_runtime.samples.triggers import Observation
from edgekit_runtime.service.rollout.comparison import choose_comparison
from edgekit_runtime.service.scheduling.scheduler import run_one
from edgekit_runtime.service.serving.served_version import Served
from edgekit_runtime.sessions.session import Session, share_session
from edgekit_runtime.tensors import Array

if TYPE_CHECKING:
    from edgekit_runtime.preprocessing.placement import Placement
    from edgekit_runtime.tasks.answerer import Answerer

_MAX_STATED_VALUES: Final = 4096  # of outputs that a sample states as numbers
_NO_LOCK: Final = nullcontext()


@dataclass(slots=True, eq=False, kw_only=True)
class ServedRequest:
    """A request with its outputs.

    Attributes:
        data: The received file, or None if the request had tensors.
        media_type: The media type that the client stated, or None.
        placement: Where preprocessing placed the picture, or None. It is needed to decode the answer.
        answer: The answer of the task. None if it is not decoded yet, empty if it cannot be decoded.
        id: The id that the client gave to the request, or None.
        taken_at: The time of the request in seconds since 1970.
    """

    served: Served
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    data: bytes | None = None
    media_type: MediaType | None = None
    placement: "Placement | None" = None
    answer: Mapping[str, Any] | None = None
    id: str | None = None
    taken_at: float = field(default_factory=time.time)

    @property
    def size_bytes(self) -> int:
        if self.data is not None:
            return len(self.data)
        return sum(array.nbytes for array in self.inputs.values())

    def observe(self) -> Observation:
        if self.answer is None:
            self.answer = self._decode(self.served.loaded.answerer, self.outputs)
        return Observation(
            manifest=self.served.loaded.manifest,
            inputs=self.inputs,
            outputs=self.outputs,
            answer=self.answer,
            find_agreement=self._find_agreement,
        )

    def seal(self, selection: Selection, sample_id: str) -> bytes:
        """Return the sample, encrypted with the public key of its order.

        Raises:
            EdgekitError, ValueError: The public key is invalid.
        """
        from edgekit_runtime.encryption.key_wrapping import seal  # cryptography: where a sample is stored

        order, manifest = selection.lines[0].order, self.served.loaded.manifest
        media_type, content = self._write_input()
        header = SampleHeader(
            id=sample_id,
            order=order.id,
            model=order.model,
            version=manifest.version,
            package_sha256=manifest.sha256,
            taken_at=max(0.0, self.taken_at),
            triggers=tuple(line.trigger.kind for line in selection.lines),
            probability=selection.probability,
            media_type=media_type,
            tensors=()
            if media_type
            else tuple(
                SampleTensor(name=name, dtype=array.dtype.name, shape=array.shape)
                for name, array in self.inputs.items()
            ),
        )
        plain = write_sample(Sample(header=header, input=content, answer=self._state_answer()))
        return seal(plain, base64.b64decode(order.public_key, validate=True), sample_info(sample_id))

    def _write_input(self) -> tuple[str, bytes]:
        """Return the media type and bytes of the input. Frames and sound of streams become PNG and WAV."""
        if self.data is None:
            arrays = (np.ascontiguousarray(array) for array in self.inputs.values())
            return "", b"".join(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in arrays)
        answerer = self.served.loaded.answerer
        media_type = self.media_type or (
            answerer.file_type if answerer is not None else MediaType("image/png")
        )
        if media_type.name == "video/x-raw":
            file = io.BytesIO()
            pixels = int(media_type.parameters["width"]) * int(media_type.parameters["height"])
            media_type.read_image(self.data, pixels).save(file, "PNG", compress_level=1)
            return "image/png", file.getvalue()
        if media_type.name == "audio/x-raw":
            return "audio/wav", write_wav(self.data, media_type.parameters)
        return media_type.name, self.data

    def _state_answer(self) -> Mapping[str, Any]:
        """Return the answer of the task, or else the small outputs as numbers."""
        answer = self.answer
        if not answer and sum(array.size for array in self.outputs.values()) <= _MAX_STATED_VALUES:
            outputs = {
                name: array.tolist() for name, array in self.outputs.items() if array.dtype.kind in "fiub"
            }
            answer = {"outputs": outputs}
        try:
            return answer if answer and len(encode_json(dict(answer))) <= MAX_ANSWER_BYTES else {}
        except (ValueError, TypeError):  # NaN, which JSON does not hold
            return {}

    def _decode(self, answerer: "Answerer | None", outputs: Mapping[str, Array]) -> Mapping[str, Any]:
        if answerer is None or answerer.task is None:
            return {}
        try:
            return answerer.answer(outputs, self.placement)
        except EdgekitError:  # a batch, or outputs that are not those of the task
            return {}

    def _find_agreement(self) -> float | None:
        """Compare with the version on trial, or with the local model if a server may have answered."""
        loaded, trial = self.served.loaded, self.served.trial
        manifest, answerer = loaded.manifest, loaded.answerer
        other: Session | None = None
        if manifest.states or not loaded.instances:
            return None
        if trial is not None and trial.current is self.served and trial.candidate.loaded.instances:
            other, answerer = trial.candidate.loaded.instances[0], trial.candidate.loaded.answerer
        else:
            other = getattr(loaded.instances[0], "local", None)  # of a `RemoteSession`
        if other is None:
            return None
        session = share_session(other)
        with getattr(session, "alone", _NO_LOCK):
            outputs = run_one(session, self.inputs)
        if isinstance(outputs, EdgekitError):
            return None
        if self.answer:
            from edgekit_runtime.tasks.agreement import compare_answers

            return compare_answers(dict(self.answer), dict(self._decode(answerer, outputs)))
        return choose_comparison(manifest.outputs, manifest.figures).compare(self.outputs, outputs)


def write_wav(samples: bytes, parameters: Mapping[str, str]) -> bytes:
    """Return sound of the media type `audio/x-raw` as a WAV file.

    Args:
        samples: The interleaved samples.
        parameters: `rate` in hertz, `channels` (1 by default), and `format` (`S16LE` by default, or `F32LE`).
    """
    rate, channels = int(parameters["rate"]), int(parameters.get("channels", "1"))
    return pack_wav(samples, rate, channels, is_float=parameters.get("format") == "F32LE")
