"""An arena that holds blocks of several sizes wastes a bounded part of itself, however long it is used."""

import itertools

import numpy as np
import pytest

from tiering.extents import PAGE, Extents, with_slack


@pytest.mark.parametrize("sizes", [(2 << 20,), (2 << 20, 8 << 20), (1 << 20, 2 << 20, 8 << 20, 32 << 20), (4096, 2 << 20, 5 << 20)])
def test_mixed_sizes_leave_little_unused(sizes):
    limit, choices = 512 << 20, np.random.default_rng(4).integers(0, len(sizes), 20_000)
    extents, held = Extents(with_slack(limit)), []
    used = worst = evicted = 0
    for turn, choice in enumerate(choices):
        size = sizes[choice]
        while used + size > limit or (at := extents.allocate(size)) is None:
            if used + size <= limit:
                worst = max(worst, limit - used)  # room enough, but in pieces
            victim = held.pop(0)
            extents.free(*victim)
            used -= victim[1]
            evicted += 1
        held.append((at, size))
        used += size
        assert extents.free_bytes == extents.size - used
        if turn % 1000 == 0:
            spans = sorted(held)
            assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
    assert evicted > 1000
    assert worst < limit // 4 + max(sizes)
    assert all(size % PAGE == 0 for size in sizes)
