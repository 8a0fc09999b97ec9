"""Room promised to one connection."""

import pytest

from kvstore import wire
from kvstore.server.ahead import Ahead


class Plane:
    """`left`: bytes in slots of 1 MiB."""

    def __init__(self):
        self.out, self.writers = [], set()

    def ahead(self, tenant, namespace, shard, tokens, count):
        made = [object() for _ in range(count)]
        self.out += made
        return made

    def not_wanted(self, tenant, slots):
        for slot in slots:
            self.out.remove(slot)

    def writing(self, tenant):
        return self.writers


@pytest.fixture
def plane():
    return Plane()


def publish(ahead, *tokens, nbytes=1 << 20):
    return wire.Publish(1, "ns", "shard", b"", [(each, 0, nbytes) for each in tokens], ahead=ahead)


async def test_room_is_kept_while_something_is_unread_and_then_given_back(plane):
    unread = True
    ahead = Ahead(plane, "t", 64 << 20, lambda: unread)
    assert ahead.promise(publish(3, 16)) == 3
    ahead._end()  # as the timer does: the loop was held up, and this may be what the room was promised for
    assert len(plane.out) == 3
    unread = False
    ahead._end()
    assert (plane.out, plane.writers) == ([], set())


async def test_blocks_of_another_kind_find_no_room_and_leave_none(plane):
    ahead = Ahead(plane, "t", 64 << 20, lambda: False)
    assert ahead.promise(publish(3, 16)) == 3
    assert len(ahead.slots(publish(0, 16))) == 3
    assert ahead.slots(publish(0, 16, 8)) == []
    assert plane.out == []
    assert ahead.promise(publish(3, 16, 8)) == 0
    ahead.close()


async def test_a_quarter_of_the_window_or_one_block(plane):
    ahead = Ahead(plane, "t", 64 << 20, lambda: False)
    assert ahead.promise(publish(100, 16, nbytes=2 << 20)) == 8
    assert ahead.promise(publish(100, 16, nbytes=48 << 20)) == 8  # what is there already stays
    ahead.close()
    assert ahead.promise(publish(100, 16, nbytes=48 << 20)) == 1
    ahead.close()
    assert plane.out == []
