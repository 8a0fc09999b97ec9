"""schema/vectors/sealing.json: keyed names, sealed objects and wrapped secrets, of fixed keys and salts."""

from __future__ import annotations

import base64
from typing import Any

from _vector_blocks import page
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.ids import NamespaceId, PrefixId
from kvstore.keys import Keys
from kvstore.sealing.frames import FRAME, DataKey, seal_into, sealed_bytes
from kvstore.sealing.veil import NameVeil

_NAMESPACE, _PREFIX = NamespaceId("9d" * 32), PrefixId("ab" * 32)
_NAMES, _DATA, _MASTER = bytes(range(32)), DataKey(bytes(range(16)), bytes(range(32, 64))), bytes(range(64, 96))


def sealing() -> dict[str, Any]:
    """The page."""
    about = (
        "Section 10: names under a name key; sealed objects of contents that count up from byte 0 (00 01 .. ff 00 ..); secrets"
        " wrapped for a place. All bytes are hex, `sealed` is base64."
    )
    sizes = (0, 5, FRAME, FRAME + 1, 700_000)
    return page(about, {"names": _names(), "objects": [_object(size) for size in sizes], "wrapped": _wrapped()})


def _names() -> list[dict[str, Any]]:
    keys = Keys("").veiled(NameVeil(_NAMES))
    blocks: list[dict[str, Any]] = [
        {"shard": shard, "prefix_id": _PREFIX, "gen": gen, "key": keys.block(_NAMESPACE, shard, _PREFIX, gen)}
        for shard, gen in (("t0of1.p0of1.g0", 1), ("t3of8.p0of1.g0", 57))
    ]
    sessions: list[dict[str, Any]] = [
        {"tenant": tenant, "session": session, "lane": lane, "key": keys.name(tenant, session, _NAMESPACE, lane)}
        for tenant, session, lane in (("default", "alice@example.com", "main"), ("a-b", "世界", "0123456789abcdef"))
    ]
    return [{"name_key": _NAMES.hex(), "namespace": _NAMESPACE, **case} for case in (*blocks, *sessions)]


def _object(size: int) -> dict[str, Any]:
    name, salt = f"manifests/default/{size:032x}/0000000001-{size:032x}", blake3(str(size).encode()).digest()
    content = (bytes(range(256)) * (size // 256 + 1))[:size]
    stored = bytearray(sealed_bytes(size))
    seal_into(_DATA, salt, name.encode(), memoryview(content), memoryview(stored))
    return {
        "content_bytes": size,
        "name": name,
        "key_id": _DATA.id.hex(),
        "data_key": _DATA.secret.hex(),
        "salt": salt.hex(),
        "stored_bytes": len(stored),
        "stored_digest": blake3(stored).hexdigest(),
        **({"stored": stored.hex()} if size < FRAME else {}),
    }


def _wrapped() -> list[dict[str, Any]]:
    cases = []
    for place, secret in (("keyring", _NAMES), (f"keys/default/{_DATA.id.hex()}", _DATA.secret)):
        salt = blake3(place.encode()).digest()
        key = blake3(b"kvtier.wrap.1" + salt, key=_MASTER).digest()
        sealed = salt + AESGCM(key).encrypt(bytes(12), secret, place.encode())
        value = {"master": "2026-11", "sealed": base64.b64encode(sealed).decode()}
        cases.append({"place": place, "master_key": _MASTER.hex(), "secret": secret.hex(), "value": value})
    return cases
