"""Decodes entropy-coded bytes that are mostly small, by interleaved rANS with adaptive tables.

A lane is one decoder with a state x between 2^16 and 2^32. The low 14 bits of x are called the slot. Each
symbol owns the slots c to c + f - 1, where f is the frequency of the symbol, and c is the sum of the
frequencies of all smaller symbols. All frequencies add up to 2^14. The slot therefore determines the next
symbol. The decoder then updates the state:

    x = f * (x >> 14) + slot - c;  if x < 2^16:  x = x << 16 | next word of 16 bits

For example, the symbol 0 owns half of all slots, so f = 2^13 and c = 0. The state 0x10005 has the slot 5,
decodes to 0, and becomes 2^13 * 4 + 5 = 0x8005. This is less than 2^16, so with the next word 0xABCD it
becomes 0x8005ABCD. All lanes do this at the same time, with numpy. If several lanes need a word, they read in
order.

Each lane decodes its own part of a chunk. There are 16 tables of frequencies. The mean of the preceding bytes
selects the table, and the means of successive tables grow by a factor of 1.4. Each table begins with a
geometric distribution. The decoder counts the decoded bytes, and rebuilds the tables whenever the count has
grown by an eighth. All arithmetic is in integers, so every machine decodes the same bytes.

Source: Duda, "Asymmetric numeral systems" (arXiv:1311.2540); docs/reference/fleet-deltas.md.
"""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

PRECISION_BITS: Final = 14
MIN_STATE: Final = 1 << 16
WORD_BITS: Final = 16
CHUNK: Final = 1 << 18
"""The maximum number of symbols that are decoded at a time."""

# Per table, in sixteenths: the least mean of the previous bytes, and the table's initial mean.
_LEAST: Final = (0, 12, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448)
_MEANS: Final = (8, 14, 19, 27, 38, 54, 76, 108, 152, 215, 304, 430, 609, 861, 1218, 1722)
_LEVELS: Final = len(_LEAST)
_SYMBOLS_PER_LANE: Final = 1 << 13
_MIN_LANES: Final = 4
_MAX_LANES: Final = 512
_MIN_STEPS: Final = 8  # before the tables are rebuilt
FIRST_SUM: Final = 64
LEVEL_OF_SUM: Final = np.searchsorted(_LEAST, np.arange(1 << 12), side="right") - 1
_INPUT_BYTES: Final = 64 << 10


def count_lanes(total: int) -> int:
    """Return the number of lanes for `total` symbols, 4 to 512. Each lane saves time but adds 4 bytes."""
    lanes = 1 << max(0, (total // _SYMBOLS_PER_LANE).bit_length() - 1)
    return min(_MAX_LANES, max(_MIN_LANES, lanes))


def split(total: int) -> Iterator[tuple[int, list[slice]]]:
    """Split `total` symbols into chunks.

    Yields:
        The number of symbols in the chunk, and its steps as a list of slices. In a step, each lane decodes
            one symbol. The tables are rebuilt after each slice.
    """
    lanes, done = count_lanes(total), 0
    for begin in range(0, total, CHUNK):
        count = min(CHUNK, total - begin)
        steps, epochs, step = -(-count // lanes), [], 0
        while step < steps:
            end = min(steps, step + max(_MIN_STEPS, done // 8))
            epochs.append(slice(step, end))
            done += end - step
            step = end
        yield count, epochs


class Tables:
    """Frequencies of the symbols 0 ... `size` - 1, one table for each level (see `Levels`).

    The key of a symbol is level · `size` + symbol.

    Attributes:
        frequencies: int64 [levels · size], indexed by key. Each table adds up to 2^14.
        begins: int64 [levels · size], indexed by key: the sum of the frequencies of all smaller symbols in
            the same table.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._prior = _PRIOR[:, :size]
        self._counts = np.zeros_like(self._prior)
        self.count(np.zeros(0, np.int64))

    def count(self, keys: NDArray[np.integer]) -> None:
        """Count symbols, and rebuild the tables. `keys` has the keys of the symbols, in any shape."""
        self._counts += np.bincount(keys.ravel(), minlength=self._counts.size).reshape(self._counts.shape)
        weights = self._prior + (self._counts << 6)
        free = (1 << PRECISION_BITS) - self.size
        frequencies = 1 + weights * free // weights.sum(axis=1, keepdims=True)
        largest = frequencies.argmax(axis=1)
        frequencies[np.arange(_LEVELS), largest] += (1 << PRECISION_BITS) - frequencies.sum(axis=1)
        self.begins = (np.cumsum(frequencies, axis=1) - frequencies).ravel()
        self.frequencies = frequencies.ravel()


def _list_prior(level: int, mean: int) -> list[int]:
    """Return the initial weights of all bytes: a geometric distribution, of 64 for a counted symbol."""
    weights = [1 << 24]
    for _ in range(255):
        weights.append(weights[-1] * mean // (16 + mean))
    symbols = 16 << max(1, level // 2 - 2)  # wide distributions are learned more slowly
    return [weight * (symbols << 6) // sum(weights) for weight in weights]


_PRIOR: Final = np.array([_list_prior(level, mean) for level, mean in enumerate(_MEANS)], np.int64)


class Levels:
    """The level of each lane, 0 to 15. It depends on the mean of about the last 16 symbols of the lane."""

    def __init__(self, lanes: int) -> None:
        self._sums = np.full(lanes, FIRST_SUM, np.int64)

    def current(self) -> NDArray[np.int64]:
        return LEVEL_OF_SUM.take(self._sums)

    def add(self, symbols: NDArray[np.int64]) -> None:
        self._sums += symbols - (self._sums >> 4)


class RansDecoder:
    """Decodes one stream, one chunk at a time.

    Raises:
        ValueError: the stream ends before its head is complete.
    """

    def __init__(self, read: Callable[[int], bytes], total: int) -> None:
        """Prepare.

        `read`: returns the next bytes of the stream, as many as requested unless it ends.
        """
        self._read = read
        self._lanes = count_lanes(total)
        self._chunks = split(total)
        self._words = np.zeros(0, np.int64)
        self._decoded = memoryview(b"")
        if total:
            self._tables = Tables(1 + self._read_exactly(1)[0])
            self._levels = Levels(self._lanes)
            states = np.frombuffer(self._read_exactly(4 * self._lanes), "<u4")
            self._states = states.astype(np.int64)

    def read(self, count: int) -> bytes:
        """Return the next `count` symbols as bytes.

        Raises:
            ValueError: the stream has fewer symbols.
        """
        pieces = []
        while count:
            if not self._decoded:
                self._decoded = memoryview(self._decode_chunk())
            pieces.append(self._decoded[:count])
            self._decoded = self._decoded[count:]
            count -= len(pieces[-1])
        return b"".join(pieces)

    def _decode_chunk(self) -> bytes:
        count, epochs = next(self._chunks, (0, []))
        if not count:
            raise ValueError("there are fewer coded bytes than the runs need")
        tables, levels = self._tables, self._levels
        keys = np.empty((epochs[-1].stop, self._lanes), np.int16)
        alphabets = np.tile(np.arange(tables.size, dtype=np.uint8), _LEVELS)
        for epoch in epochs:
            symbol_of_slot = np.repeat(alphabets, tables.frequencies)
            for step in range(epoch.start, epoch.stop):
                level = levels.current()
                slot = self._states & ((1 << PRECISION_BITS) - 1)
                symbol = symbol_of_slot.take(slot + (level << PRECISION_BITS)).astype(np.int64)
                key = level * tables.size + symbol
                quotient = self._states >> PRECISION_BITS
                self._states = tables.frequencies.take(key) * quotient + slot - tables.begins.take(key)
                self._refill()
                levels.add(symbol)
                keys[step] = key
            tables.count(keys[epoch])
        symbols: bytes = (keys % tables.size).astype(np.uint8).T.tobytes()
        return symbols[:count]

    def _refill(self) -> None:
        low = np.flatnonzero(self._states < MIN_STATE)
        if len(low) > len(self._words):
            more = self._read(_INPUT_BYTES)
            self._words = np.concatenate([self._words, np.frombuffer(more, "<u2").astype(np.int64)])
            if len(low) > len(self._words):
                raise ValueError("the coded bytes end too early")
        self._states[low] = (self._states[low] << WORD_BITS) | self._words[: len(low)]
        self._words = self._words[len(low) :]

    def _read_exactly(self, count: int) -> bytes:
        content = self._read(count)
        if len(content) < count:
            raise ValueError("the coded bytes end too early")
        return content
