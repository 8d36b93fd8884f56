"""Logs of writes, and the choice of what a power cut leaves of them."""

import struct

import pytest
from tests.hil.power_cuts.cuts import KINDS, Cut, find_flushes, pick_writes, plan_cuts
from tests.hil.power_cuts.write_log import count_entries, read_log, trim_log

from edgekit_runtime.errors import DataError

FLUSH, FUA, DISCARD = 1, 2, 4


def make_log(*entries):
    """Return a log of (sector, data, flags)."""
    parts = [struct.pack("<QQQI", 0x6A736677736872, 1, len(entries), 512).ljust(512, b"\0")]
    for sector, data, flags in entries:
        parts += [struct.pack("<QQQQ", sector, len(data) // 512, flags, 0).ljust(512, b"\0"), data]
    return b"".join(parts)


A, B, C, D = (bytes([byte]) * 1024 for byte in b"abcd")
LOG = make_log((0, A, 0), (0, b"", FLUSH), (4, B, 0), (8, C, FUA), (12, D, 0), (0, b"", FLUSH), (4, A, 0))


def test_log_has_its_writes_and_flushes():
    entries = read_log(LOG)
    assert [(entry.offset_bytes, bytes(entry.data[:1])) for entry in entries[2:5]] == [
        (2048, b"b"),
        (4096, b"c"),
        (6144, b"d"),
    ]
    assert find_flushes(entries) == [1, 5]
    assert [entry.is_durable for entry in entries].index(True) == 3


def test_log_in_a_larger_file_is_trimmed():
    assert count_entries(LOG + bytes(4096)) == 7
    assert trim_log(LOG + bytes(4096)) == LOG


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (b"", "does not begin"),
        (b"x" * 4096, "does not begin"),
        (LOG[:-1], "ends in entry 6"),
        (LOG[:1000], "ends in entry 0"),
        (LOG[:512], "ends before entry 0"),
        (make_log((0, A, DISCARD)), "discard"),
    ],
)
def test_damaged_log_is_refused(log, message):
    with pytest.raises(DataError, match=message):
        read_log(log)


@pytest.mark.parametrize(
    ("kind", "expected"), [("lost", [(3, 1024)]), ("kept", [(2, 1024), (3, 1024), (4, 1024)])]
)
def test_cut_keeps_what_was_flushed_and_what_was_durable_at_once(kind, expected):
    entries = read_log(LOG)
    assert pick_writes(entries, find_flushes(entries), Cut(5, kind, 0)) == (2, expected)


def test_cuts_lose_reorder_and_tear_writes():
    entries = read_log(LOG)
    kept = {
        kind: {
            tuple(pick_writes(entries, find_flushes(entries), Cut(5, kind, seed))[1]) for seed in range(99)
        }
        for kind in ("reordered", "torn")
    }
    sizes = (0, 1024)
    assert kept["reordered"] == {
        tuple(item for item in ((2, b), (3, 1024), (4, d)) if item[1]) for b in sizes for d in sizes
    }
    assert len(kept["torn"]) == 9  # of two writes, each is missing, half or whole


def test_planned_cuts_surround_each_flush_in_every_way():
    entries = read_log(LOG)
    cuts = plan_cuts(entries, 2, 40, 1)
    assert cuts == plan_cuts(entries, 2, 40, 1) == sorted(cuts)
    assert cuts != plan_cuts(entries, 2, 40, 2)
    assert len(cuts) == 40
    assert {cut.kind for cut in cuts if cut.at == 5} == set(KINDS)
    assert {cut.at for cut in cuts} == {3, 4, 5, 6, 7}
