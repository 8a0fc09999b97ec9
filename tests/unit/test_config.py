import re
from pathlib import Path

import pytest

import kvstore
from kvstore.config import SECTIONS, StorageUrl, load, masked, parse_bytes, parse_seconds
from kvstore.errors import Invalid

VARIABLE = re.compile(r"KVTIER_[A-Z0-9_]*[A-Z0-9]")
SETTINGS = [f"KVTIER_{section.upper()}_" for section in SECTIONS]


def test_later_sources_win_and_each_value_knows_where_it_came_from():
    loaded = load(
        toml='[dram]\nsize = "2GiB"\n[nvme]\npath = "/a"\nsize = "1GiB"\n',
        toml_name="k.toml",
        env={"KVTIER_NVME_SIZE": "3GiB", "HOME": "/x", "KVTIER_URL": "ignored: no section of that name"},
        flags={"nvme.path": "/b"},
    )
    assert (loaded.settings.dram.size, loaded.settings.nvme.size, loaded.settings.nvme.path) == (2 << 30, 3 << 30, "/b")
    shown = masked(loaded)
    assert shown["dram.size"] == (str(2 << 30), "k.toml")
    assert shown["nvme.size"][1] == "KVTIER_NVME_SIZE"
    assert shown["nvme.path"] == ("/b", "flag")
    assert shown["node.listen"] == ("127.0.0.1:7878", "default")


@pytest.mark.parametrize(
    ("toml", "names"),
    [
        ("[drum]\nsize = 1", ["[drum]", "dram"]),
        ("[dram]\nsizes = 1", ["dram.sizes", "size", "window"]),
        ('[dram]\nsize = "4 bananas"', ["dram.size", "4GiB"]),
        ('[store]\ncodec = "lzma"', ["store.codec", "bp-zstd"]),
        ("x = 1", ["x", "section"]),
        ("[dram", ["TOML"]),
        ("[tenants.a]\nuids = ['root']", ["tenants"]),
        ("[lifecycle]\nhistory = 65", ["lifecycle.history"]),
        ('[node]\nlisten = "7878"', ["node.listen"]),
        ('[store]\nurl = "s3://b?enpoint=x"', ["enpoint", "endpoint"]),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_be_right(toml, names):
    with pytest.raises(Invalid) as caught:
        load(toml=toml)
    assert all(name in caught.value.message for name in names), caught.value.message


def test_a_tenant_given_as_a_flag_is_sent_to_the_file():
    with pytest.raises(Invalid, match="configuration file") as caught:
        load(flags={"tenants.acme.max_sessions": "3"})
    assert "[tenants.<name>]" in caught.value.message


def test_sizes_and_durations():
    assert [parse_bytes(text) for text in ("1", "4KiB", "500MB", "1.5 GiB")] == [1, 4096, 500_000_000, 3 << 29]
    assert [parse_seconds(text) for text in ("1", "30s", "12h", "7d")] == [1, 30, 43_200, 604_800]
    for text in ("", "-1", "GiB", "1e9", "1 GiBs"):
        with pytest.raises(Invalid):
            parse_bytes(text)


def test_storage_urls():
    s3 = StorageUrl.parse("s3://my-bucket/a/b/?endpoint=http://127.0.0.1:8333&dram=4GiB&codec=bp-zstd&tenant=team")
    assert (s3.host, s3.path, s3.endpoint, s3.dram, s3.codec, s3.tenant) == (
        "my-bucket",
        "a/b",
        "http://127.0.0.1:8333",
        4 << 30,
        "bp-zstd",
        "team",
    )
    assert StorageUrl.parse("kvtier+unix:///run/kvtier/node.sock").path == "/run/kvtier/node.sock"
    assert StorageUrl.parse("kvtier://host").port == 7878
    assert StorageUrl.parse("memory://x").host == "x"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://x", "kvtier+unix://"),
        ("s3://key:secret@bucket", "credentials"),
        ("s3://bucket?endpoint=https://u:p@host", "credentials"),
        ("s3://bucket?token=1", "endpoint"),
        ("s3:///prefix", "bucket"),
        ("s3://bucket/../x", "prefix"),
        ("kvtier+unix://run/x.sock", "absolute"),
        ("kvtier://host:99999", "port"),
        ("memory://", "name"),
        ("s3://bucket?tenant=..", "tenant"),
    ],
)
def test_a_wrong_url_says_what_is_wrong_and_never_repeats_a_secret(url, says):
    with pytest.raises(Invalid) as caught:
        StorageUrl.parse(url)
    assert says in caught.value.message
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("text", ["memory://a[b]", "kvtier://[::1", "s3://[bucket]/x"])
def test_a_url_that_is_none_is_invalid(text):
    with pytest.raises(Invalid, match="storage URL"):
        StorageUrl.parse(text)


@pytest.mark.parametrize("variable", ["KVTIER_TENANTS_ACME_MAX_BYTES", "KVTIER_TENANTS", "KVTIER_TENANTS_ACME"])
def test_a_tenants_limit_in_a_variable_is_refused_and_not_ignored(variable):
    with pytest.raises(Invalid, match=rf"{variable}: tenants belong in a configuration file") as caught:
        load(env={variable: "1GiB"})
    assert "[tenants.<name>]" in caught.value.message


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("KVTIER_STROE_URL", ["KVTIER_STORE_URL"]),
        ("KVTIER_DISK_SIZE", ["KVTIER_DRAM_SIZE", "KVTIER_NVME_SIZE"]),
        ("KVTIER_LISTEN", ["KVTIER_NODE_LISTEN", "KVTIER_PEERS_LISTEN"]),
        ("KVTIER_TOKENS_FILE", ["KVTIER_AUTH_TOKENS_FILE"]),
        ("KVTIER_GATEWAY_LISTEN", ["KVTIER_NODE_LISTEN"]),
    ],
)
def test_a_variable_that_was_meant_as_a_setting_is_told_of(variable, meant):
    loaded = load(env={variable: "x"})
    assert loaded.settings == load().settings
    (said,) = loaded.ignored
    assert said.startswith(f"{variable} is no setting and is ignored; there is ")
    assert all(name in said for name in meant)


def test_a_variable_that_was_meant_for_a_gateway_is_not_said_to_be_one_of_a_node_only():
    assert "a gateway reads gateway.toml" in load(env={"KVTIER_GATEWAY_LISTEN": "x"}).ignored[0]
    assert "gateway" not in load(env={"KVTIER_LISTEN": "x"}).ignored[0]


@pytest.mark.parametrize(
    "ending", ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_7878_TCP", "PORT_7878_TCP_ADDR"]
)
def test_what_kubernetes_makes_of_a_service_called_kvtier_node_is_told_how_to_be_rid_of(ending):
    with pytest.raises(Invalid, match="unknown setting") as caught:
        load(env={f"KVTIER_NODE_{ending}": "tcp://10.0.0.1:7878"})
    assert "enableServiceLinks" in caught.value.remedy
    with pytest.raises(Invalid, match="unknown setting") as caught:
        load(env={"KVTIER_NODE_LISTN": "x"})
    assert "enableServiceLinks" not in caught.value.remedy


def test_variables_of_other_purposes_are_nobodys_business():
    """What ours read besides settings, what scripts read, and what Kubernetes makes of a service called kvtier."""
    ours = {name for path in Path(kvstore.__file__).parent.rglob("*.py") for name in VARIABLE.findall(path.read_text())}
    assert len(ours) > 10
    others = {"HOME", "STORE_URL", "KVTIER_VENV", "KVTIER_TEST_WORKERS", "KVTIER_SERVICE_HOST", "KVTIER_PORT_7878_TCP_ADDR"}
    told = load(env={name: "1" for name in ours | others if not name.startswith(tuple(SETTINGS))}).ignored
    assert told == ()
