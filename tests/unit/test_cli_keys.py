"""`kvtier keys`: a key file, and what it does to the keys in a bucket."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from kvstore.cli import keys, tenants
from kvstore.clock import RandomIds, SystemClock
from kvstore.errors import Denied, Gone, Invalid, NotFound, Unsupported
from kvstore.keys import Keys
from kvstore.objects import MemoryStore
from kvstore.repo import Repo
from kvstore.repo.testing import commit, inline, tiny
from kvstore.sealing import MasterKeys, Sealing


def run(app, *words: str, fails: type[Exception] | None = None) -> list[dict]:
    done = CliRunner().invoke(app, words)
    if fails is None:
        assert done.exit_code == 0, done.exception
    else:
        assert isinstance(done.exception, fails), done.exception
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def bucket(name: str, path: str) -> tuple[str, ...]:
    return ("--store", f"memory://{name}/p", "--set", f"encryption.key_file={path}", "--format", "json")


def filled(name: str, path: str, shelf, *, who: tuple[str, ...]) -> None:
    async def work() -> None:
        store, sealing = MemoryStore.named(name, SystemClock()), Sealing(MasterKeys.read(path), inline) if path else None
        async with Repo.open(store, Keys("p"), SystemClock(), RandomIds(), inline, sealing=sealing) as repo:
            for tenant in who:
                await commit(repo, shelf, "s", range(8), 0, tiny(tenant))

    asyncio.run(work())


def test_a_master_key_is_turned_and_a_tenants_keys_go_for_good(tmp_path, shelf):
    path = str(tmp_path / "keys")
    run(keys.app, "new", path, "--id", "first")
    run(keys.app, "new", path, "--id", "first", fails=Invalid)
    where = bucket("cli-keys", path)
    filled("cli-keys", path, shelf, who=("a b", "c", "d"))
    assert [(each["tenant"], each["masters"]) for each in run(keys.app, "ls", *where)] == [
        (who, ["first"]) for who in ("a b", "c", "d")
    ]

    run(keys.app, "new", path, "--id", "second")
    assert run(keys.app, "rotate", *where)[0] == {"master": "second", "rewrapped": 4, "tenant": ""}
    assert run(keys.app, "rotate", *where)[0]["rewrapped"] == 0
    assert run(keys.app, "rotate", "c", *where)[0]["tenant"] == "c"
    run(keys.app, "rotate", "nobody", *where, fails=NotFound)

    assert run(keys.app, "rm", "c", "--yes", *where)[0]["sessions"] == 1
    assert run(tenants.app, "rm", "d", "--yes", "--key", *where)[0]["sessions"] == 1
    assert {each["tenant"]: each["deleted"] for each in run(keys.app, "ls", *where)} == {"a b": False, "c": True, "d": True}
    run(keys.app, "rotate", "c", *where, fails=Gone)
    with pytest.raises(Gone):
        filled("cli-keys", path, shelf, who=("c",))


def test_other_keys_and_plain_roots_are_told_apart(tmp_path, shelf):
    path, other = str(tmp_path / "keys"), str(tmp_path / "other")
    for each in (path, other):
        run(keys.app, "new", each)
    filled("cli-keys-2", path, shelf, who=("a",))
    run(keys.app, "ls", *bucket("cli-keys-2", other), fails=Denied)
    filled("cli-keys-3", "", shelf, who=("a",))
    run(keys.app, "ls", *bucket("cli-keys-3", path), fails=Unsupported)
    run(keys.app, "rm", "a", "--yes", *bucket("cli-keys-3", ""), fails=Unsupported)
    refused = CliRunner().invoke(keys.app, ["ls", *bucket("cli-keys-3", "")]).exception
    assert str(refused).startswith("memory://cli-keys-3/p is not encrypted")
