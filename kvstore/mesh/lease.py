"""This node's place among the members, and the others as last heard of. No I/O: whoever asks the server brings the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvstore.clock import Clock
from kvstore.mesh.entries import OBSERVE, RENEW, WIDTH, Command, Names, pack
from kvstore.mesh.members import Member


class View(msgspec.Struct, frozen=True):
    """The members at one moment.

    Attributes:
        others: All but this node, by name.
        lives: The same by incarnation.
        newest: The highest incarnation given out until then: what is not above it and not here is over.
    """

    others: tuple[Member, ...] = ()
    lives: dict[int, Member] = {}
    newest: int = 0


class Lease:
    """A place that is kept by asking for it again.

    Attributes:
        view: The others.
        me: This life; None until it has an incarnation.
        replaced: Whether another process is this node now, by its name: this one is no member, and others do not see it.
        lives: How often it got an incarnation: its place is new, or was gone, and with it all its entries.
    """

    def __init__(self, names: Names, node: str, host: str, port: int, lease_s: float, clock: Clock) -> None:
        self._names, self._node, self._host, self._port = names, node, host, port
        self._lease_s, self._clock = lease_s, clock
        self._version: bytes = b""
        self._settled = 0.0
        self.view = View()
        self.me: Member | None = None
        self.replaced = False
        self.lives = 0

    def request(self) -> Command:
        """What to ask the server next."""
        life = self.me.incarnation if self.me is not None else 0
        where = f"{self._port} {self._host}"
        return RENEW.call(self._names.membership, self._node, life, int(self._lease_s * 1000), where, self._version)

    def renewed(self, answer: Sequence[Any]) -> None:
        """The server's answer to that.

        Raises:
            ValueError: It is none.
        """
        life, replaced, newest, version, lines = answer
        if not 0 < life < 1 << 8 * WIDTH:
            raise ValueError(f"{life} is no incarnation: is the server's clock right?")
        if self.me is None or self.me.incarnation != life:
            if self.me is not None:  # then others may have lost their places, too, and need a moment to take them again
                self._settled = self._clock.monotonic() + self._lease_s
            self.me = Member(self._node, life, self._host, self._port)
            self.lives += 1
        self.replaced = bool(replaced)
        if lines is None:
            return
        settling = self._clock.monotonic() < self._settled
        others = {member.node: member for member in self.view.others} if settling else {}
        others |= {member.node: member for member in _members(lines) if member.node != self._node}
        every = tuple(others[node] for node in sorted(others))
        self.view = View(every, {member.incarnation: member for member in every}, newest)
        self._version = b"" if settling else version

    def living(self, buckets: Sequence[int]) -> list[bytes]:
        """For each bucket the incarnations that live, packed, where it is this node's turn to clean up; else nothing."""
        if self.me is None or self.replaced:
            return [b""] * len(buckets)
        every = sorted((*self.view.others, self.me))
        lives, turn = pack(member.incarnation for member in every), every.index(self.me)
        return [lives if bucket % len(every) == turn else b"" for bucket in buckets]

    def over(self, life: int) -> bool:
        """Whether that life has certainly ended."""
        mine = self.me is not None and life == self.me.incarnation
        return life <= self.view.newest and life not in self.view.lives and not mine


class Onlooker(Lease):
    """Sees the members, and is none."""

    def __init__(self, names: Names, clock: Clock) -> None:
        super().__init__(names, "", "", 0, 0.0, clock)

    def request(self) -> Command:
        """What to ask the server next."""
        return OBSERVE.call(self._names.membership, self._version)

    def renewed(self, answer: Sequence[Any]) -> None:
        """The server's answer to that. Raises `ValueError` where it is none."""
        newest, version, lines = answer
        if lines is not None:
            every = tuple(sorted(_members(lines)))
            self.view = View(every, {member.incarnation: member for member in every}, newest)
        self._version = version

    def over(self, life: int) -> bool:  # noqa: ARG002  as of a lease
        """Not for it to say."""
        return False


def _members(lines: Sequence[bytes]) -> list[Member]:
    """Name, line, name, line: what is none of ours is left out."""
    found = []
    for name, line in zip(lines[::2], lines[1::2], strict=False):
        life, _, rest = line.decode(errors="replace").partition(" ")
        _, _, at = rest.partition(" ")
        port, _, host = at.partition(" ")
        if host and host.isascii() and _below(life, 1 << 8 * WIDTH) and _below(port, 1 << 16):
            found.append(Member(name.decode(errors="replace"), int(life), host, int(port)))
    return found


def _below(text: str, bound: int) -> bool:
    return text.isdecimal() and len(text) <= 13 and 0 < int(text) < bound
