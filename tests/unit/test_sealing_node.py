"""A whole node with encryption: what engines put comes back after a restart, from disk and bucket, and neither tells of it."""

import numpy as np
import pytest

import kvstore
from kvstore.errors import Denied, Invalid, Unsupported
from kvstore.ids import Namespace, Shard, chain
from kvstore.sealing import made, spelled

NS = Namespace(model="test/tiny", revision="1", layers=1, kv_heads=2, head_dim=8, dtype="F32", block_tokens=64)
TOKENS = np.arange(0x41424344, 0x41424344 + 4 * 64, dtype=np.uint32)
SHARD = Shard()


@pytest.fixture
def key_file(tmp_path) -> str:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(spelled(made("1")))
    return str(path)


def fill(index, room) -> None:
    room[:] = b"secret--" * (len(room) // 8)


async def test_a_session_comes_back_sealed_from_disk_and_bucket(tmp_path, key_file):
    links, disk = chain(NS, TOKENS), tmp_path / "nvme"
    sealed = f"memory://sealing-node/kv?dram=16MiB&key_file={key_file}"
    async with kvstore.open(f"{sealed}&nvme=16MiB&nvme_path={disk}") as kv:
        assert await kv.put(NS, SHARD, links, fill) == [True] * 4
        await kv.commit("alice", namespace=NS, base_version=0, blocks=links, durability="bucket")
    on_disk = (disk / "slab").read_bytes() + (disk / "index").read_bytes()
    assert b"secret--" not in on_disk
    assert b"alice" not in on_disk
    for more in (f"&nvme=16MiB&nvme_path={disk}", ""):
        async with kvstore.open(sealed + more) as kv:
            done = await kv.wait(await kv.restore("alice"))
            assert (done.state, done.staged_tokens) == ("ready", len(TOKENS))
            with await kv.get(NS, SHARD, links) as blocks:
                assert len(blocks) == 4
                assert all(b"secret--secret--" in bytes(lease.view) for lease in blocks.leases)


async def test_what_does_not_belong_together_is_refused_at_start(tmp_path, key_file):
    async with kvstore.open(f"memory://sealing-node-2/kv?dram=16MiB&key_file={key_file}"):
        pass
    async with kvstore.open("memory://sealing-node-3/kv?dram=16MiB"):
        pass
    with pytest.raises(Denied) as refused:
        async with kvstore.open("memory://sealing-node-2/kv?dram=16MiB"):
            pass
    assert refused.value.kind == "no_key"
    with pytest.raises(Unsupported) as plain:
        async with kvstore.open(f"memory://sealing-node-3/kv?dram=16MiB&key_file={key_file}"):
            pass
    assert plain.value.kind == "not_encrypted"
    with pytest.raises(Invalid, match="key_file"):
        async with kvstore.open(f"memory://sealing-node-2/kv?dram=16MiB&key_file={tmp_path}/none"):
            pass
    with pytest.raises(Invalid, match="key_file"):
        await kvstore.connect("kvtier://host:1?key_file=x")


async def test_a_disk_tier_whose_master_key_is_gone_says_what_to_do(tmp_path, key_file):
    disk, other = tmp_path / "nvme", tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text(spelled(made("2")))
    url = f"memory://sealing-node-4/kv?dram=16MiB&nvme=16MiB&nvme_path={disk}"
    async with kvstore.open(f"{url}&key_file={key_file}"):
        pass
    refused = []
    for key in ("", f"&key_file={other}"):
        fresh = url.replace("node-4", f"node-5{len(refused)}")  # what is wrong is the disk's key, not the bucket's
        with pytest.raises((Denied, Invalid)) as caught:
            async with kvstore.open(fresh + key):
                pass
        refused.append(caught.value)
        assert str(disk) in caught.value.message
        assert "or point nvme.path at an empty folder" in caught.value.remedy
    without, wrong = refused
    assert "is sealed" in without.message
    assert "set encryption.key_file" in without.remedy
    assert (wrong.kind, "master key '1', which is not in" in wrong.message) == ("no_key", True)
    assert "restore the key file" in wrong.remedy
    async with kvstore.open(f"{url.replace(str(disk), str(disk) + '2')}&key_file={key_file}"):
        pass
