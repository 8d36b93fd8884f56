"""Encodes bytes that are mostly small, for `edgekit_runtime.codecs.rans`.

rANS decodes in the reverse order of encoding: tables are made for all symbols first, then the states run from
the last symbol to the first.
"""

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.codecs.rans import (
    CHUNK,
    MIN_STATE,
    PRECISION_BITS,
    WORD_BITS,
    Levels,
    Tables,
    count_lanes,
    split,
)


def encode(content: NDArray[np.uint8]) -> bytes:
    """Return the stream of uint8 [n]; nothing for no bytes."""
    if not len(content):
        return b""
    lanes = count_lanes(len(content))
    frequencies, begins = _model(content, lanes)
    states, words = np.full(lanes, MIN_STATE, np.int64), []
    for step in range(len(frequencies) - 1, -1, -1):
        frequency = frequencies[step].astype(np.int64)
        full = np.flatnonzero(states >= frequency << (2 * WORD_BITS - PRECISION_BITS))
        words.append(states[full][::-1].astype("<u2"))
        states[full] >>= WORD_BITS
        quotient, rest = np.divmod(states, frequency)
        states = (quotient << PRECISION_BITS) + rest + begins[step]
    top = bytes([int(content.max())])
    return b"".join((top, states.astype("<u4").tobytes(), np.concatenate(words)[::-1].tobytes()))


def _model(content: NDArray[np.uint8], lanes: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Return frequency of each symbol, and of those before it: uint16 [steps, lanes]."""
    tables, levels = Tables(int(content.max()) + 1), Levels(lanes)
    frequencies, begins = [], []
    for number, (count, epochs) in enumerate(split(len(content))):
        steps = epochs[-1].stop
        chunk = np.zeros(steps * lanes, np.int64)
        chunk[:count] = content[number * CHUNK :][:count]
        keys = np.empty((steps, lanes), np.int64)
        for step, symbols in enumerate(chunk.reshape(lanes, steps).T):
            keys[step] = levels.current() * tables.size + symbols
            levels.add(symbols)
        for epoch in epochs:
            frequencies.append(tables.frequencies.take(keys[epoch]).astype(np.uint16))
            begins.append(tables.begins.take(keys[epoch]).astype(np.uint16))
            tables.count(keys[epoch])
    return np.concatenate(frequencies), np.concatenate(begins)
