"""The simulated allocator, against sequences worked out by hand from torch's rules."""

import pytest

from nybble.planning.allocator import MIB, Allocator


def play(*events) -> Allocator:
    allocator = Allocator()
    allocator.play(events)
    return allocator


def test_sizes_are_rounded_to_512_bytes_and_zero_takes_nothing():
    allocator = play((0, 1), (1, 513), (2, 512), (3, 0), (3, -1))
    assert allocator.allocated == 512 + 1024 + 512
    assert allocator.reserved == 2 * MIB


SEGMENTS = {  # bytes of one request -> of its segment
    MIB: 2 * MIB,
    MIB + 1: 20 * MIB,
    10 * MIB - 512: 20 * MIB,
    10 * MIB: 10 * MIB,
    10 * MIB + 1: 12 * MIB,
    33 * MIB: 34 * MIB,
}


@pytest.mark.parametrize("size", SEGMENTS)
def test_segments(size):
    assert play((0, size)).reserved == SEGMENTS[size]


def test_small_and_large_requests_have_segments_of_their_own():
    allocator = play((0, 512), (1, 2 * MIB))
    assert allocator.reserved == 22 * MIB and allocator.allocated == 2 * MIB + 512


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    # free: 64 and 32. 20 takes the 32 and leaves 12 of it, so 34 still fits into the 64.
    allocator = play((0, 64 * MIB), (1, 32 * MIB), (0, -1), (1, -1), (2, 20 * MIB), (3, 34 * MIB), (4, 12 * MIB))
    assert allocator.reserved == 96 * MIB and allocator.allocated == 66 * MIB


def test_a_large_rest_of_at_most_1_mib_stays_with_its_block():
    allocator = play((0, 32 * MIB), (0, -1), (1, 31 * MIB))
    assert allocator.allocated == 32 * MIB
    allocator = play((0, 32 * MIB), (0, -1), (1, 31 * MIB - 512))
    assert allocator.allocated == 31 * MIB - 512


def test_freed_neighbours_merge_and_one_that_is_held_between_them_keeps_them_apart():
    three = [(0, 64 * MIB), (0, -1), (1, 20 * MIB), (2, 20 * MIB), (3, 24 * MIB)]
    merged = play(*three, (1, -1), (3, -1), (2, -1), (4, 64 * MIB))
    assert merged.reserved == 64 * MIB
    apart = play(*three, (1, -1), (3, -1), (4, 44 * MIB))
    assert apart.reserved == 64 * MIB + 44 * MIB


def test_peaks_stay_and_empty_cache_gives_back_whole_segments_only():
    allocator = play((0, 40 * MIB), (1, 60 * MIB), (0, -1), (1, -1), (2, 8 * MIB))
    assert (allocator.peak_allocated, allocator.peak_reserved) == (100 * MIB, 100 * MIB)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (8 * MIB, 40 * MIB)
    assert allocator.peak_reserved == 100 * MIB
