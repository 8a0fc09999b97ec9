"""Where the lanes of an engine's sessions ended when it last saw them; what is not remembered is asked of the node."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstore import api
from kvstore.ids import Link

LANES: Final = 64  # of one conversation
HELD_BYTES: Final = 64 << 20  # of all, by what they say of their blocks
MARK: Final = 8
_EACH: Final = 512  # what an end takes beside that, about


class Tip(msgspec.Struct, frozen=True):
    """Where a lane of a session ends: its version (0: it has none yet), and what it holds.

    Attributes:
        lane: Its name; "" where the node chooses.
        marks: The first digits of its blocks' PrefixIds, 8 bytes each; empty where that is not known.
        last: PrefixId of the last one; "" where that is not known.
        branch: As in `kvstore.api.Commit`.
        durability: What was promised of it.
        named: What the node calls the lane; "" where that is not known.
    """

    lane: str = ""
    version: int = 0
    marks: bytes = b""
    last: str = ""
    branch: str = ""
    durability: api.Durability = "bucket"
    named: str = ""

    @classmethod
    def of(
        cls, lane: str, version: int, links: Sequence[Link], branch: str, durability: api.Durability = "bucket", named: str = ""
    ) -> Tip:
        """The end of a version that holds these blocks."""
        return cls(lane, version, marks_of(links), links[-1].prefix_id if links else "", branch, durability, named)

    @property
    def blocks(self) -> int:
        """How many it is known to hold."""
        return len(self.marks) // MARK

    @property
    def first(self) -> bytes:
        """The mark of its first block: what a conversation is known by."""
        return self.marks[:MARK]

    def goes_on_as(self, links: Sequence[Link]) -> bool:
        """Whether a chain begins with all of it."""
        return 0 < self.blocks <= len(links) and links[self.blocks - 1].prefix_id == self.last

    def holds(self, links: Sequence[Link]) -> bool:
        """Whether it begins with all of a chain."""
        return len(links) <= self.blocks and self.marks.startswith(marks_of(links))


class Tips:
    """The ends of conversations: of one session those that begin with one block, in the order in which they came."""

    def __init__(self) -> None:
        self._tips: OrderedDict[tuple[str, bytes], list[Tip]] = OrderedDict()
        self._held = 0

    def of(self, session: str, links: Sequence[Link]) -> Sequence[Tip]:
        """What is known of the conversation that begins as `links` do, the latest last."""
        return self._tips.get((session, marks_of(links[:1])), ())

    def put(self, session: str, tip: Tip) -> None:
        """A lane ends there now. What was not used for long is forgotten for it."""
        key = (session, tip.first)
        tips = [other for other in self._tips.get(key, ()) if other.lane != tip.lane]
        self._drop(key)
        self._tips[key] = [*tips, tip][-LANES:]
        self._held += sum(map(_size, self._tips[key]))
        while self._held > HELD_BYTES and len(self._tips) > 1:
            self._drop(next(iter(self._tips)))

    def forget(self, session: str, links: Sequence[Link]) -> None:
        """Nothing is known any more of the conversation that begins as `links` do."""
        self._drop((session, marks_of(links[:1])))

    def __len__(self) -> int:
        return len(self._tips)

    def _drop(self, key: tuple[str, bytes]) -> None:
        self._held -= sum(map(_size, self._tips.pop(key, ())))


def marks_of(links: Sequence[Link]) -> bytes:
    """The first digits of each block's PrefixId, one behind the other."""
    return bytes.fromhex("".join(link.prefix_id[: 2 * MARK] for link in links))


def _size(tip: Tip) -> int:
    return _EACH + len(tip.marks)
