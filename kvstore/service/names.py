"""Tier keys and sizes of blocks, remembered: the same ones are asked for again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore import codec
from kvstore.accounts import Account
from kvstore.ids import BlockName, Namespace, Shard, tier_key, tier_key_head, unpack_prefixes
from kvstore.repo import BlockWant
from tiering import Want

_KEYS: Final = 8192  # remembered for one shard of a namespace


class Names:
    """Of one shard of a namespace: tier keys by PrefixId (32 bytes), raw lengths by tokens.

    Attributes:
        namespace: Whose.
        shard: Which.
        account: Where what is done with them is counted.
        first: Whether it is the one rank whose tokens are counted; the others read the same tokens.
    """

    __slots__ = ("_head", "_keys", "_sizes", "_token_bytes", "account", "first", "namespace", "shard")

    def __init__(self, namespace: Namespace, shard: Shard, account: Account | None = None) -> None:
        self.namespace, self.shard = namespace, shard
        self.account = account or Account(namespace.tenant, namespace.id)
        self.first = shard.rank == shard.stage == shard.group == 0
        self._token_bytes = 0
        self._head = tier_key_head(namespace.id, shard)
        self._keys: dict[bytes, bytes] = {}
        self._sizes: dict[int, int] = {}

    def read(self, tier: str, tokens: int, nbytes: int = 0) -> None:
        """Somebody got so many tokens of it; `nbytes` where they were counted, otherwise as a full block has it."""
        if not self._token_bytes:
            self._token_bytes = self.sizes([self.namespace.block_tokens])[0] // self.namespace.block_tokens
            self.account.gpus = max(self.account.gpus, self.shard.ranks * self.shard.stages)
        self.account.read[tier] += nbytes or tokens * self._token_bytes
        if self.first:
            self.account.tokens[tier] += tokens

    def keys(self, prefixes: bytes) -> list[bytes]:
        """The tier key of each. Raises `Invalid`."""
        split = [prefixes[at : at + 32] for at in range(0, len(prefixes), 32)]
        found = list(map(self._keys.get, split))
        if None not in found:
            return found  # type: ignore[return-value]  # looked at in the line above
        if len(self._keys) + len(split) > _KEYS:
            self._keys = {}
        made = [tier_key(self._head, text) for text in unpack_prefixes(prefixes)]
        if len(split) <= _KEYS:
            self._keys.update(zip(split, made, strict=True))
        return made

    def sizes(self, tokens: Sequence[int]) -> list[int]:
        """The raw length of each. Raises `Invalid`."""
        for length in set(tokens).difference(self._sizes):
            if len(self._sizes) >= _KEYS:
                self._sizes = {}
            self._sizes[length] = codec.layout(self.namespace, self.shard, length).raw_bytes
        return [self._sizes[length] for length in tokens]

    def wants(self, prefixes: bytes, tokens: Sequence[int]) -> list[Want]:
        """What to ask the tiers for, each with the block's name. Raises `Invalid`."""
        space, shard = self.namespace, self.shard
        names = (BlockName(space.id, shard, text, length) for text, length in zip(unpack_prefixes(prefixes), tokens, strict=True))
        parts = zip(self.keys(prefixes), self.sizes(tokens), names, strict=True)
        return [Want(key, size, BlockWant(name, space)) for key, size, name in parts]
