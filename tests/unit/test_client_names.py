"""The public names, and that the client follows the table of calls."""

import inspect
import subprocess
import sys
from importlib.metadata import entry_points

import msgspec
import pytest

import kvstore
from kvstore import api
from kvstore.client import Client, SyncClient
from kvstore.client.opening import GROUP
from kvstore.errors import Invalid, Unsupported


def test_all_names_exist_and_no_other_is_public():
    for name in kvstore.__all__:
        assert getattr(kvstore, name) is not None
    loose = {name for name, value in vars(kvstore).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert loose == set(kvstore.__all__)
    assert kvstore.__all__ == sorted(kvstore.__all__)


@pytest.mark.parametrize("call", api.CALLS, ids=lambda call: call.name)
def test_the_client_has_every_call_with_the_fields_of_its_request(call):
    method = inspect.signature(getattr(Client, call.name))
    fields = [field.name for field in msgspec.structs.fields(call.request)]
    names = [{"session_id": "id"}.get(name, name) for name in list(method.parameters)[1:]]
    assert sorted(names) == sorted(fields)
    assert inspect.signature(getattr(SyncClient, call.name)) == method


def test_the_blocking_client_has_all_that_the_async_one_has():
    methods = {name for name, value in vars(Client).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert methods - {"aclose"} <= set(vars(SyncClient))
    for name in methods - {"aclose"}:
        assert getattr(SyncClient, name).__doc__ == getattr(Client, name).__doc__


LOOK = "import sys, time; t = time.perf_counter(); import kvstore; print(time.perf_counter() - t, *sorted(sys.modules))"
HEAVY = "torch transformers vllm aiohttp aiobotocore botocore obstore lmdb zstandard uvloop typer rich prometheus_client tiering"


def test_importing_kvstore_is_light(record_property):
    """What lives inside an engine brings no torch, no server, no S3 library. The time is reported, not judged."""
    found = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, timeout=60)
    seconds, *modules = found.stdout.split()
    record_property("import_kvstore_ms", round(float(seconds) * 1000))
    assert {name.partition(".")[0] for name in modules} & set(HEAVY.split()) == set()
    ours = {".".join(name.split(".")[:2]) for name in modules if name.startswith("kvstore.")}
    assert ours == {
        f"kvstore.{name}"
        for name in (
            "access",
            "api",
            "blocks",
            "client",
            "codec",
            "config",
            "copying",
            "cost",
            "directory_url",
            "errors",
            "ids",
            "keys",
            "toml_text",
            "wire",
        )
    }


def test_an_embedded_node_is_found_by_name():
    assert {entry.name for entry in entry_points(group=GROUP)} == {"s3", "memory"}


async def test_what_is_not_installed_is_named(monkeypatch):
    class Broken:
        def load(self):
            raise ImportError("no module named obstore", name="obstore")

    monkeypatch.setattr("kvstore.client.opening.entry_points", lambda group, name: [Broken()])
    with pytest.raises(Unsupported, match="obstore") as caught:
        await kvstore.connect("memory://x")
    assert "kvtier[embed]" in caught.value.remedy
    monkeypatch.setattr("kvstore.client.opening.entry_points", lambda group, name: [])
    with pytest.raises(Unsupported, match="memory://"):
        await kvstore.connect("memory://x")


async def test_a_wrong_url_is_named():
    with pytest.raises(Invalid, match="known: kvtier"):
        await kvstore.connect("https://node")
    with pytest.raises(Invalid, match="absolute path"):
        async with kvstore.open("kvtier+unix://relative"):
            pass
