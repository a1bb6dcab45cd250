"""torch's CUDA caching allocator, simulated: what a trace of allocations makes the process reserve.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with default settings: sizes are rounded to 512 bytes; up to
1 MiB they come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones get a segment of their own,
rounded to 2 MiB. A request takes the smallest free block that is large enough; what is left over becomes a free block
of its own when it is at least 512 bytes (small segments) or more than 1 MiB (large ones). Freed neighbours merge, and
no segment goes back to the driver.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

MIB = 1 << 20
ROUND = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB
ROUND_OWN = 2 * MIB


@dataclasses.dataclass(eq=False, slots=True)
class _Block:
    address: int
    size: int
    free: bool
    before: _Block | None = None
    after: _Block | None = None


class _Pool:
    """Segments of one kind, their free blocks sorted by size, then address."""

    def __init__(self, least_rest: int):
        self.least_rest = least_rest  # smaller rests stay with the block
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[int, _Block] = {}

    def add(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._keys, (block.size, block.address))
        self._blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        del self._keys[bisect.bisect_left(self._keys, (block.size, block.address))]
        del self._blocks[block.address]

    def take(self, size: int) -> _Block | None:
        """The smallest free block of at least this size, no longer free."""
        at = bisect.bisect_left(self._keys, (size, 0))
        if at == len(self._keys):
            return None
        block = self._blocks[self._keys[at][1]]
        self.remove(block)
        block.free = False
        return block

    def split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        if rest < self.least_rest:
            return
        block.size = size
        other = _Block(block.address + size, rest, True, block, block.after)
        if block.after is not None:
            block.after.before = other
        block.after = other
        self.add(other)

    def give_back(self, block: _Block) -> None:
        before, after = block.before, block.after
        if before is not None and before.free:
            self.remove(before)
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            block = before
        if after is not None and after.free:
            self.remove(after)
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        self.add(block)


class Allocator:
    """allocated, reserved and their peaks, in bytes, as torch.cuda.memory_stats counts them."""

    def __init__(self):
        self._small, self._large = _Pool(ROUND), _Pool(SMALL + 1)
        self._held: dict[int, _Block] = {}
        self._end = 0
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0

    def allocate(self, key: int, size: int) -> None:
        if size <= 0:
            return
        size = max(ROUND, -(-size // ROUND) * ROUND)
        pool = self._small if size <= SMALL else self._large
        block = pool.take(size) or self._segment(size)
        pool.split(block, size)
        self._held[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def _segment(self, size: int) -> _Block:
        if size <= SMALL:
            length = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            length = LARGE_SEGMENT
        else:
            length = -(-size // ROUND_OWN) * ROUND_OWN
        block = _Block(self._end, length, False)
        self._end += length
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return block

    def release(self, key: int) -> None:
        block = self._held.pop(key, None)
        if block is None:
            return  # of no bytes
        self.allocated -= block.size
        (self._small if block.size <= SMALL else self._large).give_back(block)

    def empty_cache(self) -> None:
        """Gives wholly free segments back."""
        for pool in (self._small, self._large):
            for block in list(pool._blocks.values()):
                if block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def play(self, events: Iterable[tuple[int, int]]) -> None:
        """events: (key, bytes) allocates, (key, -1) frees."""
        for key, size in events:
            if size < 0:
                self.release(key)
            else:
                self.allocate(key, size)
