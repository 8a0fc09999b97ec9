"""`kvtier doctor` and `kvtier fsck` on stores that are sound, unsafe, out of reach and damaged."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from typer.testing import CliRunner

import kvstore
from kvstore.cli import bucket
from kvstore.cli.commands import app
from kvstore.ids import Namespace, Shard
from kvstore.objects import OVERWRITE, MemoryStore

NAMESPACE = Namespace(model="tiny", revision="r1", layers=1, kv_heads=1, head_dim=16, dtype="F32", block_tokens=16)


@pytest.fixture(autouse=True)
def nobody_is_up(tmp_path, monkeypatch):
    """The data folder of whoever runs the tests is not theirs to look at."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))


@pytest.fixture
def store(seaweed, root, monkeypatch):
    """URL of an empty root, with its credentials in the environment."""
    for variable, value in seaweed.environment.items():
        monkeypatch.setenv(variable, value)
    return seaweed.url(root)


def kvtier(command, url, *more, code=0):
    asked = [*command.split(), "--set", f"store.url={url}", "--format", "json", *more]
    result = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def doctor(url, *more, code=0):
    return {line["name"]: line for line in kvtier("doctor", url, *more, code=code)}


@pytest.mark.seaweed
def test_a_healthy_store(store, tmp_path):
    found = doctor(store, "--set", f"nvme.path={tmp_path}", "--set", "nvme.size=1MiB")
    sound = {name for name, line in found.items() if line["status"] == "ok"}
    assert sound >= {"memory", "shared memory", "disk", "direct I/O", "open files"}
    assert sound >= {"credentials", "guarantees", "clock", "root", "versioning"}
    assert "the first node initialises it" in found["root"]["detail"]
    with kvstore.open_sync(f"{store}&dram=16MiB") as kv:
        kv.create_session("s", namespace=NAMESPACE)
    assert "holds sessions" in doctor(store)["root"]["detail"]


@pytest.mark.seaweed
def test_the_table_says_what_to_do(store):
    result = CliRunner().invoke(app, ["doctor", "--store", store], catch_exceptions=False)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    warned = next(index for index, line in enumerate(lines) if line.startswith("warn disk"))
    assert "nvme.path is not set" in lines[warned]
    assert lines[warned + 1].strip().startswith("→ set nvme.path")


@pytest.mark.seaweed
def test_credentials_the_store_does_not_know(store, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-key-of-forty-characters..")
    found = doctor(store, code=1)
    assert found["credentials"]["status"] == "ok"  # there are some
    assert found["guarantees"]["detail"].startswith("bad_credentials: ")
    assert "another-secret" not in json.dumps(found)
    assert "versioning" not in found


def test_no_credentials_anywhere(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    missing = f"encryption.key_file={tmp_path / 'none'}"
    found = doctor("s3://bucket/x?endpoint=http://127.0.0.1:9", "--set", missing, code=1)
    assert "none cannot be read" in found["encryption"]["detail"]  # a file of this host's, whatever the store says
    assert found["credentials"]["detail"].startswith("no_credentials: ")
    assert "AWS_ACCESS_KEY_ID" in found["credentials"]["remedy"]
    assert "guarantees" not in found


def test_a_store_that_is_out_of_reach_and_a_data_folder_that_says_where_disk_and_socket_are(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    found = doctor("s3://bucket/x?endpoint=http://127.0.0.1:9", "--data", str(tmp_path), "--set", "nvme.size=1MiB", code=1)
    assert found["guarantees"]["detail"].startswith("unavailable: ")
    assert "http://127.0.0.1:9" in found["guarantees"]["remedy"]
    assert found["disk"]["detail"].startswith(f"{tmp_path}/nvme: ")
    assert (found["socket"]["status"], found["socket"]["detail"]) == ("ok", f"{tmp_path}/node.sock")


class Careless(MemoryStore):
    """Takes conditions and ignores them, as several S3 servers do."""

    async def put(self, key, body, mode):
        return await super().put(key, body, OVERWRITE)


def test_an_unsafe_store_is_named_and_refused(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    @asynccontextmanager
    async def open_store(_):
        yield Careless()

    monkeypatch.setattr(bucket.S3Store, "open", open_store)
    found = doctor("s3://bucket/x?endpoint=http://127.0.0.1:9", code=1)
    assert found["guarantees"]["status"] == "fail"
    assert found["guarantees"]["detail"].startswith("unsafe_store: ")
    assert "two writers could both win" in found["guarantees"]["remedy"]


def test_without_a_store_it_says_what_is_missing():
    result = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "none: local tiers and peers only" in result.stdout
    result = CliRunner().invoke(app, ["fsck"], catch_exceptions=False)
    assert result.exit_code == 1
    assert "store.url is not set" in result.stderr


@pytest.mark.seaweed
async def test_an_epoch_from_a_backup_is_noticed(store, root, s3_store):
    async with kvstore.open(f"{store}&dram=16MiB") as kv, s3_store() as objects:
        old = await objects.get(f"{root}/epoch")
        await kv.create_session("s", namespace=NAMESPACE)
        await kv.collect(now=True)
        assert (await asyncio.to_thread(doctor, store))["root"]["detail"].endswith("epoch 3")
        await objects.put(f"{root}/epoch", bytes(old.data), OVERWRITE)
        found = (await asyncio.to_thread(doctor, store, code=1))["root"]
        assert found["detail"].startswith("epoch is 1, and a collection went by 3")
        assert "never bring back an older `epoch` alone" in found["remedy"]
        await objects.delete([f"{root}/epoch"])
        assert (await asyncio.to_thread(doctor, store, code=1))["root"]["detail"] == f"{root}/epoch is missing"


@pytest.mark.seaweed
async def test_fsck_finds_a_lost_block_and_cuts_the_session_there(store, root, s3_store):
    links = kvstore.chain(NAMESPACE, range(64))
    async with kvstore.open(f"{store}&dram=16MiB") as kv:
        await kv.put(NAMESPACE, Shard(), links, lambda _, room: room.__setitem__(slice(None), bytes(len(room))))
        await kv.commit("s", namespace=NAMESPACE, base_version=0, blocks=links)
    async with s3_store() as objects:
        [lost] = [
            meta.key async for page in objects.list(f"{root}/blocks/") for meta in page if f"/{links[2].prefix_id}/" in meta.key
        ]
        await objects.delete([lost])
    checked = await asyncio.to_thread(kvtier, "fsck", store, code=1)
    assert [finding["key"] for line in checked for finding in line["findings"] if finding["severity"] == "error"] == [lost]
    await asyncio.to_thread(kvtier, "fsck", store, "--repair", code=1)
    [clean] = await asyncio.to_thread(kvtier, "fsck", store, "--deep")
    assert clean["clean"] is True
    async with kvstore.open(f"{store}&dram=16MiB") as kv:
        session = await kv.get_session("s")
        assert (session.version, session.tokens) == (2, 32)
