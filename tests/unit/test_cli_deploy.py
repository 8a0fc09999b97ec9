"""The files people start from must fit the code: they parse, name settings that exist and pin what they pull."""

import re
import shlex
import tomllib
from configparser import RawConfigParser
from pathlib import Path

import pytest
import yaml

from kvstore.config import SECTIONS, StorageUrl, load

ROOT = Path(__file__).parents[2]
PINNED = re.compile(r"[a-z0-9./-]+:v?\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?")


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


def test_every_image_is_pinned(services):
    images = [service["image"] for service in services.values() if "image" in service]
    images += re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert len(images) == 3
    assert [image for image in images if not PINNED.fullmatch(image)] == []


def test_every_service_has_a_health_check_and_the_node_waits_for_the_store(services):
    assert all(service["healthcheck"]["test"][0] == "CMD" for service in services.values())
    assert services["node"]["depends_on"] == {"store": {"condition": "service_healthy"}}


def test_the_nodes_settings_are_known_and_fit_its_memory_limit(services):
    environment = services["node"]["environment"]
    settings = load(env=environment).settings
    assert all(name.startswith(("KVTIER_", "AWS_")) for name in environment)
    assert StorageUrl.parse(settings.store.url).endpoint == "http://127.0.0.1:8333"
    limit = int(services["node"]["mem_limit"].removesuffix("g")) << 30
    assert settings.dram.size + 4 * settings.dram.window + (1 << 30) <= limit
    grace = int(services["node"]["stop_grace_period"].removesuffix("s"))
    assert grace > settings.limits.drain


def test_no_secret_stands_in_a_file(services):
    for service in services.values():
        for name, value in service["environment"].items():
            assert not name.startswith("AWS_") or value.startswith("${"), name


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
