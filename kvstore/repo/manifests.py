"""Manifests: the immutable lists of blocks that branches name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
from cachetools import LRUCache

from kvstore import codec
from kvstore.errors import Corrupt, Invalid, KVTierError
from kvstore.ids import Shard
from kvstore.keys import manifest_name
from kvstore.model import MAX_BLOCKS, MAX_MANIFEST_BYTES, BlockRef, Manifest, ManifestText, dump, parse
from kvstore.objects.base import CREATE, Absent, Unchanged
from kvstore.repo.root import Root, Run
from kvstore.repo.slices import SLICE, sliced

_COMPRESS_ABOVE: Final = 16 * 1024
_SLICED_ABOVE: Final = 32 * 1024  # as stored: about a thousand blocks
_FIRST_READ: Final = 256 * 1024  # one request for nearly all manifests, and little memory for any
_MAKER: Final = 16  # digits of a manifest's id that say whose it is; the others are random
_FRAME: Final = b"\x28\xb5\x2f\xfd"
_MAX_STORED: Final = MAX_MANIFEST_BYTES


class Manifests:
    """Reads and writes manifests; they never change, so what was read once stays known.

    Args:
        root: Where.
        cached: Bytes of decoded manifests kept in memory.
        run: Encodes and checks large ones on a thread.
    """

    def __init__(self, root: Root, cached: int, run: Run) -> None:
        self._root, self._run = root, run
        self._cache: LRUCache[str, tuple[Manifest, int]] = LRUCache(max(cached, 1), getsizeof=lambda entry: entry[1])

    async def put(self, tenant: str, family: str, epoch: int, manifest: Manifest, write: str = "") -> str:
        """Store a manifest under a new name of generation `epoch` (R1), and return the name.

        Where a write id is given, the name tells which commit made it (R8; see `made_by`).

        Raises:
            Invalid: It could not be read again: too many blocks or shards, or a block before the last one that is not full.
        """
        fresh = self._root.ids.new()
        name = manifest_name(epoch, write[:_MAKER] + fresh[_MAKER:] if write else fresh)
        key = self._root.keys.manifest(tenant, family, name)
        body = _checked(manifest, key) if len(manifest.blocks) <= SLICE else await self._run(_checked, manifest, key)
        await self._root.put(key, body, CREATE)  # False: an earlier try of ours landed, for nobody else knows this name
        self._remember(key, manifest)
        return name

    async def get(self, key: str) -> Manifest | None:
        """A manifest, or None where it is absent. Raises `Corrupt`, `Unsupported`."""
        known = self._cache.get(key)
        return known[0] if known is not None else await self.fetch(key)

    async def fetch(self, key: str) -> Manifest | None:
        """As `get`, read from the store whether it is known or not."""
        manifest = await self._root.sound(key, partial(self._fetch, key))
        if manifest is not None:
            self._remember(key, manifest)
        return manifest

    def known(self, key: str) -> Manifest | None:
        """A manifest if it is in memory; asks nobody."""
        found = self._cache.get(key)
        return None if found is None else found[0]

    async def _fetch(self, key: str) -> Manifest | None:
        data = await self._read(key)
        if data is None or len(data) <= _SLICED_ABOVE:
            return None if data is None else unpack(data, key)
        text = await self._run(_text, data, key)
        try:
            blocks = tuple(await sliced(_blocks, text.blocks))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:  # as in `parse`
            raise Corrupt(f"{key} is not a valid Manifest: {error}") from None
        manifest = Manifest(**{**msgspec.structs.asdict(text), "blocks": blocks})
        return await self._run(_sound, manifest, key)

    async def _read(self, key: str) -> bytes | None:
        got = await self._root.store.get(key, range=(0, _FIRST_READ))
        if isinstance(got, Absent | Unchanged):
            return None
        if got.size > _MAX_STORED:
            raise Corrupt(f"{key} has {got.size} bytes, more than any manifest")
        first = bytes(got.data)
        if got.size <= _FIRST_READ:
            return first
        rest = await self._root.store.get(key, range=(_FIRST_READ, got.size))
        return None if isinstance(rest, Absent | Unchanged) else first + bytes(rest.data)

    def _remember(self, key: str, manifest: Manifest) -> None:
        weight = 400 + 250 * len(manifest.blocks) * (1 + len(manifest.shards))
        if weight <= self._cache.maxsize:
            self._cache[key] = (manifest, weight)


def made_by(name: str, write: str) -> bool:
    """Whether a manifest of that name was made by the commit with that write id."""
    return bool(write) and name.partition("-")[2].startswith(write[:_MAKER])


def _checked(manifest: Manifest, key: str) -> bytes:
    wrong = _wrong(manifest)
    if wrong:
        raise Invalid(f"this version cannot be stored: {wrong}")
    return pack(manifest, key)


def pack(manifest: Manifest, key: str) -> bytes:
    """A manifest as it is stored at `key`: JSON, in one zstd frame above 16 KiB.

    Raises:
        Invalid: It is larger than any reader takes.
    """
    body = dump(manifest, key)
    if len(body) > MAX_MANIFEST_BYTES:
        raise Invalid(f"a manifest of {len(body)} bytes is larger than {MAX_MANIFEST_BYTES}: commit fewer blocks or shards at once")
    return codec.compressed(body) if len(body) > _COMPRESS_ABOVE else body


def unpack(data: bytes, key: str) -> Manifest:
    """The inverse of `pack`, bounded before anything is allocated, and checked.

    Raises:
        Corrupt: It is not a consistent manifest.
        Unsupported: It has a newer format version (I10).
    """
    return _sound(parse(_body(data, key), Manifest, key), key)


def _text(data: bytes, key: str) -> ManifestText:
    text = parse(_body(data, key), ManifestText, key)
    if len(text.blocks) > MAX_BLOCKS:
        raise Corrupt(f"{key} has {len(text.blocks)} blocks, more than {MAX_BLOCKS}")
    return text


def _blocks(texts: Sequence[msgspec.Raw]) -> list[BlockRef]:
    return msgspec.json.decode(b"[%b]" % b",".join(texts), type=list[BlockRef])


def _body(data: bytes, key: str) -> bytes:
    return codec.decompressed(data, range(1, MAX_MANIFEST_BYTES + 1), key) if data[:4] == _FRAME else data


def _sound(manifest: Manifest, key: str) -> Manifest:
    wrong = _wrong(manifest)
    if wrong:
        raise Corrupt(f"{key}: {wrong}")
    return manifest


def _wrong(manifest: Manifest) -> str:
    """What is inconsistent in a manifest, or ""."""
    if len(manifest.blocks) > MAX_BLOCKS:
        return f"it has {len(manifest.blocks)} blocks, more than {MAX_BLOCKS}"
    if manifest.tokens != sum(block.tokens for block in manifest.blocks):
        return "tokens is not the sum over its blocks"
    if any(block.tokens != manifest.block_tokens for block in manifest.blocks[:-1]):
        return "a block before the last one is not full"
    if any(block.tokens > manifest.block_tokens for block in manifest.blocks[-1:]):
        return "its last block is larger than block_tokens"
    if any(copy.shard >= len(manifest.shards) for block in manifest.blocks for copy in block.copies):
        return "a copy is of a shard that it does not list"
    try:
        for shard in manifest.shards:
            Shard.parse(shard)
    except KVTierError as error:
        return error.message
    return ""
