"""Make the words that coded files and deltas go on from: scripts/python scripts/transport_words.py PACKAGE...

Words are what packages have beside tensors, golden tensors and digests; the most typical package comes last.
They are part of the format: with other words, `MAGIC` of the deltas has to change.
"""

import re
import sys
from itertools import takewhile
from pathlib import Path

import numpy as np

from edgekit_host.transport.package_encoder import WORDS_END, compress, list_tensors
from edgekit_runtime.agent.artifacts import deltas
from edgekit_runtime.package.archive import DEFAULT_LIMITS
from edgekit_runtime.package.canonical_zip import read_members

_RANDOM_TEXTS = (  # digests, keys and signatures; of a statement, the digest of the manifest
    (rb'("[a-z_]*sha256|"keyid|"sig)":"[^"]*"', rb'\1":""'),
    (rb'("payload":"eyJ[A-Za-z0-9+/]{230})[A-Za-z0-9+/]*([A-Za-z0-9+/=]{44}")', rb"\1\2"),
)


def list_words(package: bytes) -> bytes:
    members = read_members(memoryview(package), "package", DEFAULT_LIMITS.max_members)
    cuts = [(tensor.offset, tensor.offset + tensor.length) for tensor in list_tensors(package)]
    cuts += [(member.payload_offset, member.end_offset) for member in members if "golden/" in member.name]
    words, position = b"", 0
    for begin, end in (*sorted(cuts), (len(package), len(package))):
        words += package[position:begin]
        position = max(position, end)
    for pattern, replacement in _RANDOM_TEXTS:
        words = re.sub(pattern, replacement, words)
    return words


def main() -> None:
    words = b"".join(list_words(Path(path).read_bytes()) for path in sys.argv[1:]) + WORDS_END
    rng = np.random.default_rng(0)
    endings = [*(rng.bytes(300) for _ in range(20)), bytes(300), b"PK\3\4", b'{"artifacts":[{']
    streams = zip(*(compress(words + ending, deltas.WORDS_LZMA_MODEL) for ending in endings), strict=False)
    packed = bytes(column[0] for column in takewhile(lambda column: len(set(column)) == 1, streams))
    Path(deltas.__file__).with_name("words.lzma").write_bytes(packed)
    print(f"WORDS_BYTES: {len(words)}; packed {len(packed)}")


if __name__ == "__main__":
    main()
