"""The files people start from must fit the code: they parse, name settings that exist and pin what they pull."""

import json
import re
import shlex
import subprocess
import tomllib
from configparser import RawConfigParser
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
import yaml

from kvstore.access import Tokens
from kvstore.config import SECTIONS, StorageUrl, load
from kvstore.errors import Denied
from kvstore.gateway.settings import load as load_gateway

ROOT = Path(__file__).parents[2]
PINNED = re.compile(r"[a-z0-9./-]+:(v?\d+\.\d+[\w.-]*|RELEASE\.[\dTZ-]+)(@sha256:[0-9a-f]{64})?")
VARIABLE = re.compile(r"\$\{(\w+)(?::[-?]([^}]*))?\}")
ONCE = {"volumes", "bootstrap"}  # they end
NODES = {"node-a", "node-b"}


@pytest.fixture(scope="module")
def services():
    """Every variable at its default, where it has one."""
    text = VARIABLE.sub(lambda found: found[2] or "", (ROOT / "compose.yaml").read_text())
    return yaml.safe_load(text)["services"]


def test_every_image_is_pinned(services):
    images = [service["image"] for service in services.values() if "image" in service]
    images += re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert len(images) == 12
    assert [image for image in images if not PINNED.fullmatch(image)] == []
    assert services["minio"]["image"] == "quay.io/minio/minio:RELEASE.2025-09-07T16-13-09Z"


@pytest.mark.parametrize("field", ["image", "mem_limit", "pids_limit", "logging"])
def test_every_service_says(services, field):
    assert [name for name, service in services.items() if not service.get(field)] == []


def test_no_service_has_rights_that_it_does_not_need(services):
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "cap_add" not in service, name
        assert "privileged" not in service, name
        assert service["user"].partition(":")[0] not in {"0", "root"}, name


def test_ports_are_published_on_loopback_only(services):
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == len({port.split(":")[1] for port in ports}) == 5
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_whoever_serves_has_a_health_check_and_is_waited_for(services):
    assert {name for name, service in services.items() if "healthcheck" not in service} == ONCE
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            ends = other in ONCE
            assert how["condition"] == ("service_completed_successfully" if ends else "service_healthy"), (name, other)


def test_the_nodes_settings_are_known_and_fit_its_memory_limit(services):
    for name in NODES:
        environment = services[name]["environment"]
        settings = load(env=environment).settings
        assert settings.node.id == name
        assert StorageUrl.parse(settings.store.url).endpoint == "http://store:9000"
        limit = int(services[name]["mem_limit"].removesuffix("g")) << 30
        assert settings.dram.size + 4 * settings.dram.window + (1 << 30) <= limit
        grace = int(services[name]["stop_grace_period"].removesuffix("s"))
        assert grace > settings.limits.drain
        # No other node, and nobody else in the network, is mistaken for this one.
        host = settings.peers.advertise.partition(":")[0]
        assert services[name]["networks"]["inside"]["ipv4_address"] == host
        assert ip_address(host) in ip_network(settings.peers.networks[0])


def test_the_gateways_file_and_flags_fit(services):
    settings = load_gateway(
        (ROOT / "deploy/gateway.toml").read_text(),
        engines=[one.removeprefix("--engine=") for one in services["gateway"]["command"] if one.startswith("--engine=")],
    )
    assert list(settings.engines) == ["a", "b"]
    assert settings.auth.tokens_file.removeprefix("/run/secrets/") in services["gateway"]["secrets"]


def test_no_secret_stands_in_a_file_and_each_is_made_by_the_script(services):
    text = (ROOT / "compose.yaml").read_text()
    made = (ROOT / "deploy/make-secrets").read_text()
    secrets = yaml.safe_load(VARIABLE.sub("", text))["secrets"]
    used = {name for service in services.values() for name in service.get("secrets", [])}
    assert used == set(secrets)
    for name, where in secrets.items():
        assert where == {"file": f"./secrets/{name}"}
        stem, _, kind = name.rpartition(".")
        assert name in made or (kind == "token" and f"token {stem} " in made), name
    for service in services.values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN|ACCESS_KEY", name):
                assert str(value).startswith("/run/secrets/"), name


def test_every_variable_of_compose_is_in_the_example_with_its_default():
    given = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    used = {name: default for name, default in VARIABLE.findall((ROOT / "compose.yaml").read_text()) if not name.endswith("ID")}
    assert {"COMPOSE_PROFILES": "minio", "KVTIER_UID": "7878", "KVTIER_GID": "7878"} | used == given


def test_the_scripts_help_is_its_own():
    done = subprocess.run([ROOT / "deploy/make-secrets", "--help"], check=True, capture_output=True, text=True)
    assert "Usage: deploy/make-secrets [FOLDER]" in done.stdout


def test_the_script_makes_what_the_code_reads_and_changes_nothing_the_second_time(tmp_path):
    (tmp_path / ".env.example").write_text((ROOT / ".env.example").read_text())
    subprocess.run([ROOT / "deploy/make-secrets", tmp_path], check=True, capture_output=True)
    folder = tmp_path / "secrets"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    subprocess.run([ROOT / "deploy/make-secrets", tmp_path], check=True, capture_output=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert folder.stat().st_mode & 0o777 == 0o700
    tokens = Tokens.parse(before["tokens.toml"].decode())
    scopes = {
        name: tokens.of(before[f"{name}.token"].decode(), 0).scopes for name in ("operator", "client", "gateway", "prometheus")
    }
    assert scopes == {"operator": {"admin"}, "client": {"read", "write"}, "gateway": {"read"}, "prometheus": {"metrics"}}
    identities = {one["name"]: one["credentials"][0]["secretKey"] for one in json.loads(before["seaweedfs.json"])["identities"]}
    assert identities["owner"] == before["store-owner.password"].decode()
    assert identities["node"] in before["store-node.aws"].decode()
    assert before["directory.password"] in before["valkey.acl"]
    assert "KVTIER_UID=0" not in (tmp_path / ".env").read_text()


def test_a_token_whose_file_was_deleted_is_replaced_and_the_others_stay(tmp_path):
    (tmp_path / ".env.example").write_text((ROOT / ".env.example").read_text())
    folder = tmp_path / "secrets"

    def made() -> dict[str, str]:
        subprocess.run([ROOT / "deploy/make-secrets", tmp_path], check=True, capture_output=True)
        return {path.name: path.read_text() for path in folder.iterdir()}

    before = made()
    (folder / "client.token").unlink()
    after = made()
    assert {name for name in before if before[name] != after[name]} == {"client.token", "tokens.toml"}
    tokens = Tokens.parse(after["tokens.toml"])
    assert len(tokens.known) == 4
    assert tokens.of(after["client.token"], 0).scopes == {"read", "write"}
    assert tokens.of(after["operator.token"], 0).scopes == {"admin"}
    with pytest.raises(Denied):
        tokens.of(before["client.token"], 0)


def test_what_the_image_copies_is_in_the_build_context():
    copied = {
        name
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        for name in line.split()
    }
    let_in = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)


def test_the_example_configuration_loads():
    loaded = load(toml=(ROOT / "deploy/kvtier.toml").read_text(), toml_name="kvtier.toml")
    assert loaded.settings.nvme.size == 100 << 30
    assert loaded.origin["lifecycle.collect_interval"] == "kvtier.toml"


def test_every_setting_stands_in_the_example_and_at_its_default_where_it_is_commented_out():
    text = (ROOT / "deploy/kvtier.toml").read_text()
    given = tomllib.loads(text)
    shown = load(toml=re.sub(r"^# (?=\w+ = |\[)", "", text, flags=re.MULTILINE)).settings
    for section, kind in SECTIONS.items():
        assert f"[{section}]" in text
        body = text.split(f"[{section}]\n")[1].split("\n[")[0]
        assert re.findall(r"^(?:# )?(\w+) = ", body.split("\n# [")[0], re.MULTILINE) == list(kind.__struct_fields__), section
        for field in set(kind.__struct_fields__) - set(given[section]):
            assert getattr(getattr(shown, section), field) == getattr(kind(), field), f"{section}.{field}"
    assert shown.tenants["research"].uids == (1000, 1001)


def test_the_unit_starts_a_node_and_leaves_it_time_to_drain():
    unit = RawConfigParser(strict=False)
    unit.read(ROOT / "deploy/kvtier.service")
    assert shlex.split(unit["Service"]["ExecStart"])[1:] == ["serve", "--config", "/etc/kvtier/kvtier.toml"]
    assert int(unit["Service"]["TimeoutStopSec"]) > load().settings.limits.drain
