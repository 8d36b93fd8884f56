"""Makes the deltas and coded files that a fleet offers in addition to packages.

There are two kinds of delta, and the smaller one is used. The first is zstd with the old package as its
dictionary. The second encodes the differences of the model's tensors as runs, and is small for int8 weights
even if nearly every byte has changed. A file is only offered if it reproduces the package exactly, byte for
byte.

Source: docs/reference/fleet-deltas.md.
"""

import hashlib
import io
import threading

import zstandard

from edgekit_host.transport.package_encoder import WORTH, encode
from edgekit_runtime.agent.artifacts.deltas import MAX_ZSTD_BYTES, RUNS_SUFFIX, ZSTD_SUFFIX, rebuild
from edgekit_runtime.errors import PackageError


def make_delta(old: bytes, new: bytes) -> tuple[str, bytes] | None:
    """Return the file suffix and content of the smallest delta.

    Return None if the delta is not at least a fifth smaller than the new package.

    Args:
        old: The content of a valid old package. If empty, a coded file is made, which needs no old package.
        new: The content of the valid new package.
    """
    makers = [(RUNS_SUFFIX, encode(old, new))]
    if old:
        makers.append((ZSTD_SUFFIX, _make_zstd_delta(old, new)))
    candidates = [
        (suffix, content)
        for suffix, content in makers
        if content is not None and len(content) < WORTH * len(new)
    ]
    for suffix, content in sorted(candidates, key=lambda candidate: len(candidate[1])):
        if _is_exact(content, old, new):
            return suffix, content
    return None


def _is_exact(content: bytes, old: bytes, new: bytes) -> bool:
    digest = hashlib.sha256()
    try:
        for piece in rebuild(io.BytesIO(content), old, len(new), threading.Event()):
            digest.update(piece)
    except PackageError:
        return False
    return digest.digest() == hashlib.sha256(new).digest()


def _make_zstd_delta(old: bytes, new: bytes) -> bytes | None:
    if len(old) + len(new) > MAX_ZSTD_BYTES:
        return None
    parameters = zstandard.ZstdCompressionParameters.from_level(
        19,
        source_size=len(new),
        dict_size=len(old),
        window_log=max(10, (len(old) + len(new)).bit_length()),
        enable_ldm=True,
        write_checksum=False,
    )
    dictionary = zstandard.ZstdCompressionDict(old, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return zstandard.ZstdCompressor(compression_params=parameters, dict_data=dictionary).compress(new)
