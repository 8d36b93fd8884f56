"""A session that decodes pictures and sound before the model runs.

A manifest enables it with the backend option `decode`, such as `{"pixels": "jpeg"}`. Each call decodes one
file per input. Calls are not batched.
"""

import math
from collections.abc import Mapping
from typing import Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.codecs.media import MediaCodec, decode_media
from edgekit_runtime.errors import BackendError, DataError, RefusedInputError
from edgekit_runtime.sessions.session import Session, cancel_runs
from edgekit_runtime.tensors import DTYPES, Array, TensorSpec

_MAX_BYTES: Final = 64 << 20  # limit of a decoded file if the model takes any size


class MediaSession:
    """A session that decodes files for some inputs, and runs another session with the decoded arrays.

    Attributes:
        inputs: The inputs of the model. A decoded input is a 1-D uint8 array with the content of one file.
        outputs: The outputs of the model. If the number of rows is free in the model, it is 1 here.
        is_concurrent: Whether several threads can run the session at once.
    """

    __slots__ = ("_codecs", "_session", "_specs", "inputs", "is_concurrent", "outputs")

    def __init__(self, session: Session, decode: JsonValue) -> None:
        """Create a session that decodes inputs for `session`, which it owns from now on.

        `decode` is a dict from input names to codecs, as in a manifest.

        Raises:
            BackendError: `decode` contains an unknown codec, or an input that does not suit its codec.
        """
        stated = decode if isinstance(decode, Mapping) else {"decode": decode}
        try:
            codecs = {name: MediaCodec.parse(str(codec)) for name, codec in stated.items()}
        except DataError as cause:
            raise BackendError(f"option decode: {cause}") from cause
        self._session, self._codecs = session, codecs
        self._specs = {spec.name: spec for spec in session.inputs}
        for name, codec in codecs.items():
            spec = self._specs.get(name)
            if spec is None or len(spec.shape) not in (codec.rank, codec.rank + 1):
                raise BackendError(f"option decode: the model has no input '{name}' for {codec.name}")
            if spec.dtype not in codec.dtypes:
                raise BackendError(f"option decode: '{name}' is {spec.dtype}, {codec.name} is not")
        free = {spec.shape[0] for spec in session.inputs if spec.name in codecs}
        self.inputs = tuple(
            TensorSpec(spec.name, "uint8", (f"{spec.name}_bytes",)) if spec.name in codecs else spec
            for spec in session.inputs
        )
        self.outputs = tuple(
            TensorSpec(spec.name, spec.dtype, (1, *spec.shape[1:]))
            if spec.shape and isinstance(spec.shape[0], str) and spec.shape[0] in free
            else spec
            for spec in session.outputs
        )
        self.is_concurrent: bool = getattr(session, "is_concurrent", False)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        decoded = dict(inputs)
        for spec in self.inputs:
            codec = self._codecs.get(spec.name)
            if codec is not None and spec.name in inputs:
                spec.check(inputs[spec.name])
                decoded[spec.name] = self._decode(codec, self._specs[spec.name], inputs[spec.name])
        return self._session.run(decoded)

    def cancel_runs(self) -> None:
        cancel_runs(self._session)

    def close(self) -> None:
        self._session.close()

    def _decode(self, codec: MediaCodec, spec: TensorSpec, data: Array) -> Array:
        sizes = spec.shape[-codec.rank :]
        values = math.prod(size for size in sizes if isinstance(size, int))
        is_fixed = all(isinstance(size, int) for size in sizes)
        most_bytes = values * DTYPES[spec.dtype].itemsize if is_fixed else _MAX_BYTES
        try:
            channels = 1 if sizes[-1] == 1 else 3
            array = decode_media(
                codec, data.tobytes(), dtype=spec.dtype, max_bytes=most_bytes, channels=channels
            )
            array = array[None] if len(spec.shape) > codec.rank else array
            spec.check(array)
        except DataError as cause:
            raise RefusedInputError(f"input '{spec.name}': {cause}") from cause
        return array
