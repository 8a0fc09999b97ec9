"""What promises of a tenant hold of a disk that several share: each block once, however many hold it."""

import pytest

from kvstore.errors import Overloaded
from kvstore.service.parts import Parts
from tiering.testing import want_of


def test_a_block_counts_once_and_until_the_last_promise_lets_go():
    parts, blocks = Parts(100), [want_of(n, 40) for n in range(3)]
    for _ in range(2):
        parts.refuse("a", blocks[:2])
        parts.take("a", blocks[:2])
    with pytest.raises(Overloaded, match="hold 80 bytes of the disk, and this one needs 40 more: at most 100"):
        parts.refuse("a", blocks)
    parts.refuse("b", blocks[:2])
    parts.give("a", blocks)  # one of them was never held
    with pytest.raises(Overloaded):
        parts.refuse("a", blocks[2:])
    parts.give("a", blocks[:1])
    parts.refuse("a", blocks[2:])
    parts.take("a", blocks[2:])
    with pytest.raises(Overloaded):
        parts.refuse("a", blocks[:1])
