"""Dashboards and alerts show metrics that exist, and what nobody shows is a short list with reasons."""

import json
import re
from pathlib import Path

import pytest
import yaml
from aiohttp import ClientSession

from kvstore import api
from kvstore.config import Bytes, DramSettings, PeersSettings, Settings, StoreSettings
from kvstore.gateway.app import Gateway
from kvstore.gateway.engines import EngineSettings
from kvstore.gateway.settings import GatewaySettings
from kvstore.node import Node
from kvstore.server.app import HttpServer
from kvstore.server.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = json.loads((DEPLOY / "grafana/dashboards/kvtier.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
UNSHOWN = {
    "kvtier_codec": "which codec and why: `kvtier stats` says it in words",
    "kvtier_codec_switched_total": "as kvtier_codec",
}


def shown():
    """Every expression of the dashboard and the alerts."""
    panels = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", [])]
    variables = [one["definition"] for one in BOARD["templating"]["list"]]
    return [*panels, *variables, *(rule["expr"] for group in ALERTS["groups"] for rule in group["rules"])]


def names(expressions):
    """The metrics in them; of a histogram its family."""
    found = {name for each in expressions for name in re.findall(r"\bkvtier_\w+", each)}
    return {name.removesuffix("_bucket") for name in found}


@pytest.fixture
async def exposed():
    """Every family of a node in a mesh with a bucket, and of a gateway, neither of which did anything yet."""
    settings = Settings(
        store=StoreSettings(url="memory://deploy-metrics"),
        dram=DramSettings(size=Bytes(4 << 20)),
        peers=PeersSettings(listen="127.0.0.1:1", static=("b=127.0.0.1:2",)),
    )
    async with Node.open(settings) as node:
        stats = await node.service.call("default", "stats", api.Nothing())
        page = Metrics().expose(stats, "")[0].decode()
    engines = {"a": EngineSettings(url="http://127.0.0.1:1")}
    async with Gateway.open(GatewaySettings(engines=engines, listen="127.0.0.1:0")) as gateway, ClientSession() as client:
        page += await (await client.get(f"{gateway.url}/metrics")).text()
    return set(re.findall(r"^# TYPE (\w+) ", page, re.MULTILINE))


async def test_what_is_shown_exists_and_what_exists_is_shown(exposed):
    wanted = names(shown())
    assert len(wanted) > 60
    assert wanted - exposed == set()
    assert exposed - wanted == set(UNSHOWN)


def test_the_dashboard_has_a_row_for_each_concern_and_panels_that_do_not_overlap():
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert rows == [
        "Use", "Latency", "Bytes", "Commits", "Restores", "Collector", "Store", "Cost", "Mesh", "Gateway", "Processes"
    ]  # fmt: skip
    taken = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_grafana_is_told_where_the_dashboard_and_its_data_are():
    services = yaml.safe_load((DEPLOY.parent / "compose.yaml").read_text())["services"]
    provisioning = DEPLOY / "grafana/provisioning"
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    [provider] = yaml.safe_load((provisioning / "dashboards/kvtier.yml").read_text())["providers"]
    used = {panel["datasource"]["uid"] for panel in BOARD["panels"] if "datasource" in panel}
    used |= {target["datasource"]["uid"] for panel in BOARD["panels"] for target in panel.get("targets", [])}
    assert used == {source["uid"]}
    host, port = source["url"].removeprefix("http://").split(":")
    assert any(line.endswith(f"0.0.0.0:{port}") for line in services[host]["command"])
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]


def test_every_alert_says_what_it_means_and_what_to_do():
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert set(rule["annotations"]) == {"summary", "do", "runbook"}, rule["alert"]


def test_every_alert_has_an_entry_in_the_runbook_and_the_runbook_no_other():
    named = {rule["alert"]: rule["annotations"]["runbook"] for group in ALERTS["groups"] for rule in group["rules"]}
    assert named == {alert: f"docs/runbook.md#{alert.lower()}" for alert in named}
    page = (DEPLOY.parent / "docs/runbook.md").read_text()
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == list(named)
    severities = re.findall(r"^### (\w+)\n\n\*(\w+)\.\*", page, re.MULTILINE)
    assert severities == [(rule["alert"], rule["labels"]["severity"]) for group in ALERTS["groups"] for rule in group["rules"]]


async def test_a_guarantee_that_a_node_cannot_give_is_a_sample(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    nowhere = StoreSettings(url="s3://bucket/kv?endpoint=http://127.0.0.1:1")
    async with (
        Node.open(Settings(store=nowhere, dram=DramSettings(size=Bytes(4 << 20)))) as node,
        HttpServer.open(node.service, "127.0.0.1:0") as server,
        ClientSession() as client,
    ):
        page = await (await client.get(f"{server.url}/metrics")).text()
    assert 'kvtier_degraded{part="bucket"} 1.0' in page
    assert "clock" not in page
