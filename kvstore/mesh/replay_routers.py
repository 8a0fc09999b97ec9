"""Routers of a replay: the product's, and what others do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from blake3 import blake3

from kvstore.clock import SeededIds
from kvstore.mesh.members import owner
from kvstore.mesh.replay_nodes import Job, Node, Setup
from kvstore.mesh.replay_trace import BLOCK_TOKENS
from kvstore.mesh.router import Candidate, Prompt, Router


class Chooses(Protocol):
    """A router, as a replay sees it. `joined` and `left` tell it of all nodes, `has` and `lost` of their blocks."""

    def choose(self, job: Job) -> str:
        """The node that answers this; there is one."""
        ...

    def answered(self, job: Job) -> None:
        """Its first token came."""
        ...

    def joined(self, node: Node) -> None:
        """One more."""
        ...

    def left(self, node: Node) -> None:
        """It is dead."""
        ...

    def told(self, node: str, has: Sequence[bytes], lost: Sequence[bytes], *, disk: bool) -> None:
        """A node's memory or disk has these now, and those no more."""
        ...

    def stored(self, keys: Sequence[bytes]) -> None:
        """The bucket has these."""
        ...


class _Simple:
    """What baselines share: the nodes, by name, and nothing to learn."""

    def __init__(self, setup: Setup, monotonic: Callable[[], float]) -> None:  # noqa: ARG002  the routers' common signature
        self.nodes: dict[str, Node] = {}
        self.turns = itertools.count()

    def answered(self, job: Job) -> None:
        pass

    def joined(self, node: Node) -> None:
        self.nodes[node.name] = node

    def left(self, node: Node) -> None:
        self.nodes.pop(node.name, None)

    def told(self, node: str, has: Sequence[bytes], lost: Sequence[bytes], *, disk: bool) -> None:
        pass

    def stored(self, keys: Sequence[bytes]) -> None:
        pass

    def turn(self, names: Sequence[str]) -> str:
        return names[next(self.turns) % len(names)]


class RoundRobin(_Simple):
    """Each in turn."""

    def choose(self, job: Job) -> str:  # noqa: ARG002  whoever it is
        """The next one."""
        return self.turn(list(self.nodes))


class SessionHash(_Simple):
    """By the second block, which tells conversations apart where the first is a system prompt that all share.

    By the highest random weight, so that a node which comes or goes moves only its own: the best that a hash can do.
    """

    def choose(self, job: Job) -> str:
        """Always the same one, while nodes are the same."""
        names, keys = list(self.nodes), job.request.keys
        return self.of(keys[min(1, len(keys) - 1)], names) if keys else self.turn(names)

    def of(self, key: bytes, names: Sequence[str]) -> str:
        """Whose this block is."""
        return owner(key, names)


class SessionModulo(SessionHash):
    """The same by the remainder of a hash: a node that comes or goes moves nearly all."""

    def of(self, key: bytes, names: Sequence[str]) -> str:
        """Whose this block is."""
        return names[int.from_bytes(blake3(key).digest(8)) % len(names)]


class LongestPrefix(_Simple):
    """Whoever has the longest prefix in its own memory or on its disk, by perfect knowledge; equals in turn."""

    def choose(self, job: Job) -> str:
        """Load does not count."""
        lengths = {name: _leading(node, job.request.keys) for name, node in self.nodes.items()}
        longest = max(lengths.values())
        return self.turn([name for name, length in lengths.items() if length == longest])


class LeastLoaded(_Simple):
    """Whoever has the fewest tokens waiting or being read, by perfect knowledge; equals in turn. Blocks do not count."""

    def choose(self, job: Job) -> str:  # noqa: ARG002  whoever it is
        """Prefixes do not count."""
        work = {name: sum(one.request.tokens for one in node.jobs()) for name, node in self.nodes.items()}
        least = min(work.values())
        return self.turn([name for name, tokens in work.items() if tokens == least])


class ByPrice:
    """The product's router. It knows the machine's speeds, as after some prompts, and of blocks what it is told."""

    def __init__(self, setup: Setup, monotonic: Callable[[], float]) -> None:
        self._setup, self._router = setup, Router(monotonic, SeededIds(setup.seed).jitter)

    def choose(self, job: Job) -> str:
        """The cheapest."""
        prompt = Prompt(job.request.keys, job.request.tokens, BLOCK_TOKENS, self._setup.machine.token_bytes)
        best = self._router.rank(prompt, most=1)[0]
        job.predicted_s, job.ticket = best.ms / 1e3, self._router.chosen(prompt, best)
        return best.candidate

    def answered(self, job: Job) -> None:
        """The gateway sees it."""
        assert job.ticket is not None
        self._router.answered(job.ticket)

    def joined(self, node: Node) -> None:
        """An engine with a node of its own."""
        self._router.join(Candidate(node.name, node.name, self._setup.sharing), self._setup.machine.speeds)

    def left(self, node: Node) -> None:
        """And gone."""
        self._router.leave(node.name)

    def told(self, node: str, has: Sequence[bytes], lost: Sequence[bytes], *, disk: bool) -> None:
        """As a directory or a node's events tell."""
        self._router.node_lost(node, lost, disk=disk)
        self._router.node_has(node, has, disk=disk)

    def stored(self, keys: Sequence[bytes]) -> None:
        """As a node tells of its commits."""
        self._router.bucket_has(keys)


def _leading(node: Node, keys: Sequence[bytes]) -> int:
    return next((at for at, key in enumerate(keys) if not node.has(key)), len(keys))


BASELINE: Final = "round-robin"
ROUTERS: Final[dict[str, Callable[[Setup, Callable[[], float]], Chooses]]] = {
    BASELINE: RoundRobin,
    "session-hash": SessionHash,
    "session-modulo": SessionModulo,
    "longest-prefix": LongestPrefix,
    "least-loaded": LeastLoaded,
    "kvtier": ByPrice,
}
