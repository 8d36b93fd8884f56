"""Chooses the power cuts to try, and the writes that each leaves on the device.

A device keeps all writes before the last flush. Of later writes it may keep any subset, in any order, and of
a write perhaps only the first sectors. A sector is whole or untouched.
"""

import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tests.hil.power_cuts.write_log import LogEntry

KINDS: Final = ("lost", "kept", "reordered", "torn")
"""Kept writes since the last flush: none, all, some, or only the first sectors of some."""

_SECTOR_BYTES: Final = 512


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """One power cut.

    Attributes:
        at: number of the first entry of the log that the device did not see.
        kind: one of `KINDS`.
        seed: seed of its random choices.
    """

    at: int
    kind: str
    seed: int


def plan_cuts(entries: Sequence[LogEntry], begin: int, count: int, seed: int) -> list[Cut]:
    """Return cuts from entry `begin` on, sorted by instant: those around each flush, and at least `count`.

    Before each flush there is a cut of every kind, since then the most is at stake, and after it one. The
    other cuts are at random instants with writes since the last flush.
    """
    source = random.Random(seed)  # no secret
    flushes = [number for number in find_flushes(entries) if number >= begin]
    cuts = [Cut(at, kind, source.getrandbits(32)) for at in flushes for kind in KINDS]
    cuts += [Cut(at + 1, "kept", source.getrandbits(32)) for at in flushes]
    instants = [at + 1 for at in range(begin, len(entries)) if not entries[at].is_flush]
    for _ in range(count - len(cuts)):
        cuts.append(Cut(source.choice(instants), source.choice(KINDS[2:]), source.getrandbits(32)))
    return sorted(cuts)


def find_flushes(entries: Sequence[LogEntry]) -> list[int]:
    """Return the numbers of the entries that are flushes."""
    return [number for number, entry in enumerate(entries) if entry.is_flush]


def pick_writes(
    entries: Sequence[LogEntry], flushes: Sequence[int], cut: Cut
) -> tuple[int, list[tuple[int, int]]]:
    """Return how many entries are durable at a cut, and which later writes were kept.

    Args:
        entries: the log.
        flushes: `find_flushes(entries)`.
        cut: the power cut.

    Returns:
        The number of durable entries, and for each later write that was kept its number and how many of its
        first bytes.
    """
    earlier = bisect.bisect_left(flushes, cut.at)
    durable = flushes[earlier - 1] + 1 if earlier else 0
    source, kept = random.Random(cut.seed), []  # no secret
    for number in range(durable, cut.at):
        size = len(entries[number].data)
        if not entries[number].is_durable:
            if cut.kind == "lost" or (cut.kind in ("reordered", "torn") and source.random() < 0.5):
                continue
            if cut.kind == "torn":  # or whole
                size = _SECTOR_BYTES * source.randint(1, max(1, size // _SECTOR_BYTES))
        kept.append((number, size))
    return durable, kept
