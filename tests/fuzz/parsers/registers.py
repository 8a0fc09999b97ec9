"""What a bucket holds as JSON: registers, manifests, namespaces. Digests are made right, so that what they guard is reached."""

import contextlib

import msgspec
from blake3 import blake3

from kvstore.codec import compressed
from kvstore.errors import KVTierError
from kvstore.lifecycle.hints import CollectHint, UsageHint
from kvstore.model import BlockRef, Branch, Copy, Epoch, Format, Head, Manifest, Name, Version, dump, parse, parse_namespace, sealed
from kvstore.repo.manifests import pack, unpack
from kvstore.repo.testing import tiny
from kvstore.sealing.keyfile import MasterKey, MasterKeys, Wrapped
from kvstore.sealing.registers import Keyring, StoredKey, TenantKeys
from parsers.target import Target, same

_KEY = "root/of/some/key/here"
_NS = tiny()
_BLOCK = BlockRef(prefix_id="ab" * 32, tokens=4, copies=(Copy(0, 1, 4096, 4096),))
_VALUES = (
    Epoch(epoch=3, write="w"),
    Head(
        write="w",
        recent=("a",),
        branches={"b": Branch(seq=2, manifest="m", n=1, history=(Version(seq=1, manifest="m", n=1, at=2.0),))},
    ),
    Name(name="n", family="f", branch="b"),
    Format(store_id="s", created=1.5, guarantees={"a": True}),
    Keyring(write="w", names=Wrapped("k", bytes(80))),
    TenantKeys(write="w", keys=(StoredKey("ab" * 16, Wrapped("k", bytes(80))),)),
    CollectHint(at=1.0, epoch=3),
    UsageHint(at=1.0, usage=[]),
)
_KINDS = tuple(type(value) for value in _VALUES)
_MASTER = MasterKeys([MasterKey("k", b"k" * 32)])


def registers(data):
    """The first byte says which kind."""
    kind, text = _KINDS[data[0] % len(_KINDS) if data else 0], data[1:]
    for body in (text, sealed(text[1:], kind, _KEY) if text[:1] == b"{" else text):
        try:
            value = parse(body, kind, _KEY)
        except KVTierError:
            continue
        same(parse(dump(value, _KEY), kind, _KEY), value)
        for wrapped in [value.names] if isinstance(value, Keyring) else [key.wrapped for key in getattr(value, "keys", ())]:
            with contextlib.suppress(KVTierError):
                _MASTER.unwrap(wrapped, "keys/a")


def manifests(data):
    bodies = [data]
    if data[:1] == b"{":
        bodies += [body := sealed(data[1:], Manifest, _KEY), compressed(body)]
    for body in bodies:
        try:
            manifest = unpack(body, _KEY)
        except KVTierError:
            continue
        same(unpack(pack(manifest, _KEY), _KEY), manifest)


def namespaces(data):
    try:
        found = parse_namespace(data, blake3(data).hexdigest())
    except KVTierError:
        return
    same(msgspec.json.decode(msgspec.json.encode(found), type=type(found)), found)


def _text(value):
    return msgspec.json.encode(value)


_MANIFEST = Manifest(namespace=_NS.id, shards=("t0of1.p0of1.g0",), block_tokens=4, tokens=4, labels={"a": "b"}, blocks=(_BLOCK,))
_JSON = (b"{", b"}", b"[", b"]", b'":', b",", b"null", b"true", b"1e999", b"-1", b"9007199254740991", b'"\\ud800"', b'"v":1')
TARGETS = (
    Target(
        "registers",
        registers,
        tuple(bytes([index]) + _text(value) for index, value in enumerate(_VALUES)),
        (*_JSON, *(f'"{field}":'.encode() for kind in (*_KINDS, Branch, Version) for field in kind.__struct_fields__)),
        1 << 14,
    ),
    Target(
        "manifests",
        manifests,
        (_text(_MANIFEST), compressed(dump(_MANIFEST, _KEY))),
        (*_JSON, *(f'"{field}":'.encode() for kind in (Manifest, BlockRef) for field in kind.__struct_fields__)),
        1 << 14,
    ),
    Target("namespaces", namespaces, (_text(_NS),), (*_JSON, *(f'"{field}":'.encode() for field in _NS.__struct_fields__))),
)
