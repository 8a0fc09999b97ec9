"""What an engine holds on its device, told in blocks of ours: from its own events, whose blocks have other sizes and names."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvstore.errors import Invalid
from kvstore.ids import Namespace, NamespaceId, PrefixId, as_tokens, block_id, extra_key
from kvstore.mesh.engine_events import Batch, Cleared, Hash, Removed, Stored

KNOWN: Final = 1 << 18  # blocks of an engine that are remembered, those that are gone included

Told = Callable[[Sequence[PrefixId], Sequence[PrefixId]], None]
"""`told(more, fewer)`: these blocks are on the engine's device now, and those are not any more."""


class _Block:
    """One block of an engine, and its place in a chain of ours."""

    __slots__ = ("base", "extra", "groups", "here", "name", "parent", "tokens", "upto")

    def __init__(self, parent: _Block | None, base: PrefixId | NamespaceId, tokens: Sequence[int], extra: list[bytes]) -> None:
        self.parent = parent  # the one before it in its group; None for the first
        self.base = base  # our block before its group
        self.tokens, self.extra = as_tokens(tokens), extra
        self.upto: int = len(tokens) + (parent.upto if parent else 0)  # tokens of its group, up to its end
        self.groups: list[_Group] = []  # those that it is part of: prompts part in the middle of one, too
        self.name: PrefixId | None = None  # our block that ends with it, where a group does
        self.here = True


class _Group:
    """The smallest run that is a whole number of the engine's blocks, and of ours."""

    __slots__ = ("blocks", "names")

    def __init__(self, blocks: list[_Block], names: list[PrefixId]) -> None:
        self.blocks, self.names = blocks, names

    @property
    def here(self) -> bool:
        return all(block.here for block in self.blocks)


class Residency:
    """Follows one engine.

    Blocks that depend on more than tokens and a cache salt (adapters, images, embeddings) are not followed: a router that does not
    know of them sends a request elsewhere at worst.

    Args:
        namespace: Of the router's chains. Its `block_tokens` and the engine's must divide each other.
        told: Hears of every change.

    Attributes:
        ignored: Blocks that could not be placed: what they follow is not known, or they are not followed.
    """

    def __init__(self, namespace: Namespace, told: Told) -> None:
        self._namespace, self._told = namespace, told
        self._blocks: OrderedDict[tuple[int, Hash], _Block] = OrderedDict()
        self._held: Counter[PrefixId] = Counter()  # by how many ranks
        self.ignored = 0

    def apply(self, batch: Batch) -> None:
        """What the engine did."""
        for event in batch.events:
            if isinstance(event, Stored):
                self._stored(batch.rank, event)
            elif isinstance(event, Removed):
                for name in event.hashes:
                    self._removed(batch.rank, name)
            elif isinstance(event, Cleared):
                self._cleared(batch.rank)

    def forget(self) -> None:
        """Nothing is known of it any more: events were lost, or it is another process now."""
        gone = list(self._held)
        self._blocks.clear()
        self._held.clear()
        if gone:
            self._told([], gone)

    def _stored(self, rank: int, event: Stored) -> None:
        ours, theirs = self._namespace.block_tokens, event.block_tokens
        if max(ours, theirs) % min(ours, theirs):
            raise Invalid(f"an engine has blocks of {theirs} tokens and the router of {ours}: choose a size that divides the other")
        before = None if event.parent is None else self._blocks.get((rank, event.parent))
        if event.parent is not None and before is None:
            self.ignored += len(event.hashes)
            return
        for index, name in enumerate(event.hashes):
            known = self._blocks.get((rank, name))
            if known is None:
                extra = self._extra(event, index)
                if extra is None:
                    self.ignored += len(event.hashes) - index
                    return
                known = self._placed(before, event.tokens[index * theirs : (index + 1) * theirs], extra)
                self._remember((rank, name), known)
                if known.upto == max(ours, theirs):
                    self._complete(known)
            elif not known.here:
                known.here = True
                for group in known.groups:
                    if group.here:
                        self._hold(group.names)
            before = known

    def _placed(self, before: _Block | None, tokens: Sequence[int], extra: list[bytes]) -> _Block:
        if before is None:
            return _Block(None, self._namespace.id, tokens, extra)
        if before.name is not None:
            return _Block(None, before.name, tokens, extra)
        return _Block(before, before.base, tokens, extra)

    def _complete(self, last: _Block) -> None:
        blocks = [last]
        while blocks[-1].parent is not None:
            blocks.append(blocks[-1].parent)
        blocks.reverse()
        tokens, size = np.concatenate([block.tokens for block in blocks]), self._namespace.block_tokens
        names, parent, extra = list[PrefixId](), last.base, blocks[0].extra
        for start in range(0, len(tokens), size):
            parent = block_id(self._namespace.id, parent, tokens[start : start + size], () if start else extra)
            names.append(parent)
        last.name, group = names[-1], _Group(blocks, names)
        for block in blocks:
            block.groups.append(group)
        if group.here:
            self._hold(names)

    def _hold(self, names: Sequence[PrefixId]) -> None:
        self._held.update(names)
        new = [name for name in names if self._held[name] == 1]
        if new:
            self._told(new, [])

    def _removed(self, rank: int, name: Hash) -> None:
        block = self._blocks.get((rank, name))
        if block is None or not block.here:
            return
        whole = [group for group in block.groups if group.here]
        block.here = False
        for group in whole:
            self._let_go(group.names)

    def _let_go(self, names: Sequence[PrefixId]) -> None:
        self._held.subtract(names)
        gone = [name for name in names if self._held[name] <= 0]
        for name in gone:
            del self._held[name]
        if gone:
            self._told([], gone)

    def _cleared(self, rank: int) -> None:
        for key in [key for key in self._blocks if key[0] == rank]:
            self._removed(*key)
            del self._blocks[key]

    def _remember(self, key: tuple[int, Hash], block: _Block) -> None:
        self._blocks[key] = block
        if len(self._blocks) > KNOWN:
            self._removed(*next(iter(self._blocks)))
            self._blocks.popitem(last=False)

    def _extra(self, event: Stored, index: int) -> list[bytes] | None:
        """Our keys of one block; None where it is not followed."""
        said = event.extra[index] if event.extra else ()
        if event.lora or len(said) > 1:
            return None
        if not said:
            return []
        first = event.parent is None and index == 0
        return [extra_key("salt", said[0])] if first and isinstance(said[0], str) else None
