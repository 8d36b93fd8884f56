"""Encodes bytes that are mostly small, for `edgekit_runtime.codecs.rans`.

rANS encodes in the reverse order of decoding. The encoder first creates the tables for all symbols, and then
encodes from the last symbol to the first.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.codecs.rans import (
    CHUNK,
    FIRST_SUM,
    LEVEL_OF_SUM,
    MIN_STATE,
    PRECISION_BITS,
    WORD_BITS,
    Tables,
    count_lanes,
    split,
)

_FEW_LANES: Final = 16
"""Up to this number of lanes, Python's numbers are faster than arrays of numpy."""


def encode(content: NDArray[np.uint8]) -> bytes:
    """Return uint8 values of shape (n,) as a rANS stream, which is empty if n is 0."""
    if not len(content):
        return b""
    lanes = count_lanes(len(content))
    frequencies, begins = _model(content, lanes)
    states, words = (_code_by_lane if lanes <= _FEW_LANES else _code_by_step)(frequencies, begins)
    top = bytes([int(content.max())])
    return b"".join((top, states.astype("<u4").tobytes(), words.astype("<u2").tobytes()))


def _code_by_lane(
    frequencies: NDArray[np.uint16], begins: NDArray[np.uint16]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the final states of shape (lanes,), and the words."""
    lanes = frequencies.shape[1]
    states, words = np.empty(lanes, np.int64), np.full(frequencies.shape, -1, np.int64)
    for lane in range(lanes):
        state, lane_words = MIN_STATE, []
        symbols = zip(frequencies[::-1, lane].tolist(), begins[::-1, lane].tolist(), strict=True)
        for frequency, begin in symbols:
            word = -1
            if state >= frequency << (2 * WORD_BITS - PRECISION_BITS):
                word = state & (1 << WORD_BITS) - 1
                state >>= WORD_BITS
            lane_words.append(word)
            quotient, remainder = divmod(state, frequency)
            state = (quotient << PRECISION_BITS) + remainder + begin
        states[lane] = state
        words[::-1, lane] = lane_words
    return states, words[words >= 0]


def _code_by_step(
    frequencies: NDArray[np.uint16], begins: NDArray[np.uint16]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the final states of shape (lanes,), and the words."""
    states, words = np.full(frequencies.shape[1], MIN_STATE, np.int64), []
    for step in range(len(frequencies) - 1, -1, -1):
        frequency = frequencies[step].astype(np.int64)
        full = np.flatnonzero(states >= frequency << (2 * WORD_BITS - PRECISION_BITS))
        words.append(states[full][::-1] & (1 << WORD_BITS) - 1)
        states[full] >>= WORD_BITS
        quotient, remainder = np.divmod(states, frequency)
        states = (quotient << PRECISION_BITS) + remainder + begins[step]
    return states, np.concatenate(words)[::-1]


def _model(content: NDArray[np.uint8], lanes: int) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Return the frequency of each symbol and the sum of frequencies below it, of shape (steps, lanes)."""
    tables, sums = Tables(int(content.max()) + 1), np.full(lanes, FIRST_SUM, np.int64)
    frequencies, begins = [], []
    for number, (count, epochs) in enumerate(split(len(content))):
        steps = epochs[-1].stop
        chunk = np.zeros(steps * lanes, np.int64)
        chunk[:count] = content[number * CHUNK :][:count]
        symbols = chunk.reshape(lanes, steps)
        keys = LEVEL_OF_SUM.take(_follow_sums(symbols, sums)) * tables.size + symbols.T
        for epoch in epochs:
            frequencies.append(tables.frequencies.take(keys[epoch]).astype(np.uint16))
            begins.append(tables.begins.take(keys[epoch]).astype(np.uint16))
            tables.count(keys[epoch])
    return np.concatenate(frequencies), np.concatenate(begins)


def _follow_sums(symbols: NDArray[np.int64], sums: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sums of `Levels` before each symbol, of shape (steps, lanes), and update `sums`."""
    before = np.empty(symbols.shape[::-1], np.int64)
    if len(sums) > _FEW_LANES:
        for step, step_symbols in enumerate(symbols.T):
            before[step] = sums
            sums += step_symbols - (sums >> 4)
        return before
    for lane, lane_symbols in enumerate(symbols):
        total, totals = int(sums[lane]), []
        for symbol in lane_symbols.tolist():
            totals.append(total)
            total += symbol - (total >> 4)
        before[:, lane], sums[lane] = totals, total
    return before
