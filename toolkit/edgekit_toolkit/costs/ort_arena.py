"""A simulation of onnxruntime's memory arena, to find the memory that a sequence of allocations uses.

The arena takes regions of doubling size from the system and splits them into blocks. An allocation gets the
smallest free block that fits. Memory is never returned to the system. Only used pages are resident, so the
unused end of a region does not count.

Source: onnxruntime, core/framework/bfc_arena.cc, with the defaults of a CPU session (next power of two, first
region 1 MiB); after TensorFlow's best fit with coalescing.
"""

from bisect import bisect_left, insort
from typing import Final, NamedTuple

_GRAIN_BYTES: Final = 256
_FIRST_REGION_BYTES: Final = 1 << 20
# A larger rest of a block is always split off, and a smaller one only if it is at least half of the block.
_MOST_WASTE_BYTES: Final = 128 << 20


class Block(NamedTuple):
    """A block of memory: `size` bytes from byte `offset` of the region with index `region`.

    Blocks are ordered by size, then by position, because the arena searches them in this order.
    """

    size: int
    region: int
    offset: int


class Arena:
    def __init__(self) -> None:
        self._free: list[Block] = []
        self._starts: dict[tuple[int, int], Block] = {}  # free blocks by (region, first byte)
        self._ends: dict[tuple[int, int], Block] = {}  # free blocks by (region, byte behind the last)
        self._touched: list[int] = []
        self._next_region_bytes = _FIRST_REGION_BYTES

    @property
    def resident_bytes(self) -> int:
        """The resident memory in bytes. A region counts up to the last byte that was ever allocated in it."""
        return sum(self._touched)

    def allocate(self, size: int) -> Block:
        """Return a block of at least `size` bytes. `size` must be at least 1."""
        size = -(-size // _GRAIN_BYTES) * _GRAIN_BYTES
        if self._fit(size) == len(self._free):
            self._grow(size)
        block = self._free[self._fit(size)]
        self._remove(block)
        rest_bytes = block.size - size
        if rest_bytes >= size or rest_bytes >= _MOST_WASTE_BYTES:
            self._insert(Block(rest_bytes, block.region, block.offset + size))
            block = Block(size, block.region, block.offset)
        self._touched[block.region] = max(self._touched[block.region], block.offset + size)
        return block

    def release(self, block: Block) -> None:
        """Free `block` and join it with adjacent free blocks."""
        size, region, offset = block
        if after := self._starts.get((region, offset + size)):
            self._remove(after)
            size += after.size
        if before := self._ends.get((region, offset)):
            self._remove(before)
            size, offset = size + before.size, before.offset
        self._insert(Block(size, region, offset))

    def _fit(self, size: int) -> int:
        return bisect_left(self._free, Block(size, -1, -1))

    def _grow(self, size: int) -> None:
        doubled = False
        while self._next_region_bytes < size:
            self._next_region_bytes *= 2
            doubled = True
        self._insert(Block(self._next_region_bytes, len(self._touched), 0))
        self._touched.append(0)
        if not doubled:
            self._next_region_bytes *= 2

    def _insert(self, block: Block) -> None:
        insort(self._free, block)
        self._starts[block.region, block.offset] = block
        self._ends[block.region, block.offset + block.size] = block

    def _remove(self, block: Block) -> None:
        del self._free[bisect_left(self._free, block)]
        del self._starts[block.region, block.offset]
        del self._ends[block.region, block.offset + block.size]
