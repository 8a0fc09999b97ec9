"""Section 10 of FORMAT.md, read from the page alone, against the vectors and against the code."""

import base64
import json
from pathlib import Path

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV

from kvstore.keys import Keys
from kvstore.sealing.frames import DataKey, Opening, seal_into, sealed_bytes
from kvstore.sealing.keyfile import MasterKey, MasterKeys, Wrapped
from kvstore.sealing.veil import NameVeil

VECTORS = json.loads((Path(__file__).parents[2] / "schema" / "vectors" / "sealing.json").read_text())


def keyed(key: bytes, *parts: bytes) -> bytes:
    return blake3(b"".join(parts), key=key).digest()


@pytest.mark.parametrize("case", VECTORS["names"], ids=lambda case: case["key"][:24])
def test_names(case):
    secret = bytes.fromhex(case["name_key"])
    keys = Keys("").veiled(NameVeil(secret))
    if "prefix_id" in case:
        text = "/".join((case["namespace"], case["shard"], case["prefix_id"])).encode()
        name = keyed(keyed(secret, b"kvtier.names.blocks.1"), text).hex()
        assert case["key"] == f"blocks/{case['namespace']}/{case['shard']}/{name}/{case['gen']:010d}"
        assert case["key"] == keys.block(case["namespace"], case["shard"], case["prefix_id"], case["gen"])
        return
    session = "=" + keyed(keyed(secret, b"kvtier.names.sessions.1"), f"{case['tenant']}/{case['session']}".encode()).hex()
    place = f"names/{case['tenant']}/{session}/{case['namespace']}"
    lanes = AESSIV(blake3(b"kvtier.names.lanes.1", key=secret).digest(length=64))
    lane = base64.urlsafe_b64encode(lanes.encrypt(case["lane"].encode(), [place.encode()])).decode().rstrip("=")
    assert case["key"] == f"{place}/{lane}"
    assert case["key"] == keys.name(case["tenant"], case["session"], case["namespace"], case["lane"])


def content_of(case) -> bytes:
    """`bytes` counting up, cut to the length."""
    return (bytes(range(256)) * (case["content_bytes"] // 256 + 1))[: case["content_bytes"]]


@pytest.mark.parametrize("case", VECTORS["objects"], ids=lambda case: str(case["content_bytes"]))
def test_objects(case):
    content, salt, key_id, secret = content_of(case), *(bytes.fromhex(case[name]) for name in ("salt", "key_id", "data_key"))
    head = b"kvtseal1" + key_id + salt + len(content).to_bytes(8, "little")
    cipher, frame = AESGCM(keyed(secret, b"kvtier.seal.1", salt)), 262_144
    pieces = [content[at : at + frame] for at in range(0, len(content), frame)] or [b""]
    name = case["name"].encode()
    read = head + b"".join(cipher.encrypt(at.to_bytes(12, "little"), piece, head + name) for at, piece in enumerate(pieces))
    assert (len(read), blake3(read).hexdigest()) == (case["stored_bytes"], case["stored_digest"])
    assert case.get("stored", read.hex()) == read.hex()

    stored = bytearray(sealed_bytes(len(content)))
    seal_into(DataKey(key_id, secret), salt, name, memoryview(content), memoryview(stored))
    assert stored == read
    into = memoryview(bytearray(len(content)))
    assert Opening(memoryview(stored), {key_id: DataKey(key_id, secret)}, name, into).finish(len(stored)) == len(content)
    assert into == content


@pytest.mark.parametrize("case", VECTORS["wrapped"], ids=lambda case: case["place"])
def test_wrapped(case):
    master, stored = bytes.fromhex(case["master_key"]), base64.b64decode(case["value"]["sealed"])
    cipher = AESGCM(keyed(master, b"kvtier.wrap.1", stored[:32]))
    secret = cipher.decrypt(bytes(12), stored[32:], case["place"].encode())
    assert secret.hex() == case["secret"]
    keys = MasterKeys([MasterKey(case["value"]["master"], master)])
    assert keys.unwrap(Wrapped(case["value"]["master"], stored), case["place"]) == secret
