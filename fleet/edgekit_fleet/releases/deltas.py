"""Makes the deltas and coded files that the fleet offers beside packages.

Two deltas are made and the smaller one is kept: zstd with the old package as dictionary, and runs over the
tensors of the model, which encode differences of int8 weights well even if nearly every byte has changed. A
file is offered only after it has made the package here, byte for byte, as a device will.

Source: docs/reference/fleet-deltas.md.
"""

import tempfile
import threading
from pathlib import Path

import zstandard

from edgekit_host.transport.package_encoder import WORTH, encode
from edgekit_runtime.agent.artifacts.deltas import MAX_ZSTD_BYTES, RUNS_SUFFIX, ZSTD_SUFFIX, apply_delta
from edgekit_runtime.errors import PackageError
from edgekit_runtime.system.atomic_files import hash_file


def make_delta(base: Path | None, new: Path) -> tuple[str, bytes] | None:
    """Return suffix and content of the smallest delta from one package to another; None if none pays off.

    Args:
        base: the old package; it is valid. None makes a coded file, which needs no old one.
        new: the package to make from it; it is valid.

    Raises:
        OSError: a package cannot be read.
    """
    old, target = base.read_bytes() if base else b"", new.read_bytes()
    makers = [(RUNS_SUFFIX, encode(old, target))]
    if base:
        makers.append((ZSTD_SUFFIX, _make_zstd_delta(old, target)))
    candidates = [
        (suffix, content)
        for suffix, content in makers
        if content is not None and len(content) < WORTH * len(target)
    ]
    for suffix, content in sorted(candidates, key=lambda candidate: len(candidate[1])):
        if _is_exact(content, base, new):
            return suffix, content
    return None


def _is_exact(content: bytes, base: Path | None, new: Path) -> bool:
    with tempfile.TemporaryDirectory(prefix="edgekit-delta-") as folder:
        delta, rebuilt = Path(folder) / "delta", Path(folder) / "made"
        delta.write_bytes(content)
        size_bytes, sha256 = new.stat().st_size, hash_file(new)
        try:
            apply_delta(delta, base, rebuilt, size_bytes=size_bytes, sha256=sha256, stop=threading.Event())
        except PackageError:
            return False
    return True


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
