"""Real servers: the embedded SeaweedFS, bucket administration on it, and stores that the probe must refuse."""

import asyncio
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path

import pytest

from kvstore.clock import RandomIds, SystemClock
from kvstore.errors import Denied, KVTierError, Unavailable, Unsupported
from kvstore.objects import CREATE, OVERWRITE, S3Settings, S3Store, probe
from kvstore.objects.admin import BucketAdmin
from kvstore.objects.credentials import Credentials
from kvstore.objects.seaweed import SeaweedFS

pytestmark = pytest.mark.seaweed
KEYS = Credentials("AKIAKVTIERTESTKEY001", "secretsecretsecretsecret")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rclone(folder, port):
    binary = shutil.which("rclone", path=sysconfig.get_path("scripts"))
    flags = ["--config", str(folder / "none.conf"), "--addr", f"127.0.0.1:{port}"]
    return [binary, "serve", "s3", "--auth-key", f"{KEYS.access_key},{KEYS.secret_key}", *flags, str(folder)], {}


def nanio(folder, port):
    command = [sys.executable, "-m", "nanio", "serve", "--data-dir", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    return command, {"NANIO_ACCESS_KEY": KEYS.access_key, "NANIO_SECRET_KEY": KEYS.secret_key}


@pytest.mark.parametrize("server", [rclone, nanio])
async def test_a_store_that_ignores_conditions_is_refused(server, tmp_path):
    (tmp_path / "bucket").mkdir()
    port = free_port()
    command, environment = server(tmp_path, port)
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(  # noqa: ASYNC220  it only starts
            command, env={**os.environ, **environment}, stdout=log, stderr=log
        )
    try:
        settings = S3Settings(bucket="bucket", endpoint=f"http://127.0.0.1:{port}", timeout_s=10.0)
        async with S3Store.open(settings, credentials=lambda: KEYS) as store:
            for _ in range(200):
                try:
                    await store.now()
                    break
                except Unavailable:
                    await asyncio.sleep(0.1)
            with pytest.raises(Unsupported, match="If-None-Match where something is was accepted") as error:
                await probe(store, "probe/1", SystemClock(), RandomIds())
            assert error.value.kind == "unsafe_store"
            assert [meta.key async for page in store.list("probe/") for meta in page] == []
    finally:
        running.kill()
        running.wait()


async def test_what_was_acknowledged_survives_kill_9_of_the_server(tmp_path):
    bodies = {f"k{n}": os.urandom(1000 * n) for n in range(1, 20)} | {"big": os.urandom(3 << 20)}
    async with SeaweedFS.open(tmp_path / "data") as server:
        async with S3Store.open(server.settings(), credentials=lambda: server.credentials) as store:
            for key, body in bodies.items():
                await store.put(key, body, CREATE)
        keys, endpoint = server.credentials, server.endpoint
        server.kill()
    for name in ("seaweed.json", "data"):
        assert (tmp_path / "data" / name).exists()
    assert (tmp_path / "data/seaweed.json").stat().st_mode & 0o777 == 0o600
    async with SeaweedFS.open(tmp_path / "data") as server:
        assert (server.credentials, server.endpoint) == (keys, endpoint)
        async with S3Store.open(server.settings(), credentials=lambda: server.credentials) as store:
            assert {key: bytes((await store.get(key)).data) for key in bodies} == bodies
            assert isinstance(await store.put("more", b"x", OVERWRITE), object)


PARENT = """
    import sys, time
    from pathlib import Path
    from kvstore.objects.seaweed import SeaweedFS

    server = SeaweedFS.launch(Path(sys.argv[1]))
    server.wait_ready()
    print(server._process.pid, server.endpoint, flush=True)
    time.sleep(60)
"""


def ended(pid):
    """Gone, or a zombie that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == b""
    except FileNotFoundError:
        return True


def test_kill_9_of_the_parent_ends_the_server_and_frees_its_folder(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    pid, endpoint = parent.stdout.readline().split()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    server = SeaweedFS.launch(tmp_path)  # waits for the other one's lock
    try:
        server.wait_ready()
        assert server.endpoint == endpoint
        assert ended(pid)
    finally:
        server.kill()


def test_a_server_whose_folder_is_gone_ends_with_its_parent_too(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    pid, _ = parent.stdout.readline().split()
    parent.kill()
    shutil.rmtree(tmp_path, ignore_errors=True)
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 10
    while not ended(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert ended(pid)


def test_a_folder_serves_one_server_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("kvstore.objects.seaweed._STOP_S", 0.2)
    first = SeaweedFS.launch(tmp_path)
    try:
        with pytest.raises(Unavailable, match="another SeaweedFS"):
            SeaweedFS.launch(tmp_path)
    finally:
        first.kill()


def test_a_server_leaves_no_socket_behind(tmp_path):
    server = SeaweedFS.launch(tmp_path)
    try:
        server.wait_ready()
        names = [f"{name}-{port}" for name, port in server._ports.items()]
        names += [f"{name}-grpc-{port + 1}" for name, port in server._ports.items()]
        sockets = [Path(f"/tmp/seaweedfs-{name}.sock") for name in names]
        assert any(socket.exists() for socket in sockets)
    finally:
        server.stop()
    assert not any(socket.exists() for socket in sockets)


def test_a_server_that_cannot_start_says_where_to_look(tmp_path, monkeypatch):
    monkeypatch.setattr("kvstore.objects.seaweed.find_weed", lambda: shutil.which("false"))
    server = SeaweedFS.launch(tmp_path)
    with pytest.raises(Unavailable, match="did not come up") as error:
        server.wait_ready()
    assert "seaweed.log" in error.value.remedy


def test_without_the_binary_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(Unsupported) as error:
        SeaweedFS.launch(None)
    assert "kvtier[local]" in error.value.remedy


def test_the_server_listens_on_loopback_only(seaweed):
    other = next((a for a in socket.gethostbyname_ex(socket.gethostname())[2] if not a.startswith("127.")), None)
    if other is None:
        other = "127.0.0.2"
    port = int(seaweed.endpoint.rpartition(":")[2])
    with pytest.raises(OSError, match=r"refused|timed out"):
        http.client.HTTPConnection(other, port, timeout=2).connect()


async def test_a_bucket_is_prepared_once(seaweed, root):
    settings = seaweed.settings(bucket=f"b{root}")
    async with BucketAdmin.open(settings, seaweed.credentials) as admin:
        first, second = await admin.prepare(), await admin.prepare()
        assert (first.created, first.lifecycle, first.warnings) == (True, True, ())
        assert (second.created, second.lifecycle) == (False, True)
        await admin.tag({"owner": "kvtier"})
        await admin.tag({"stage": "test"})
        assert await admin.tags() == {"owner": "kvtier", "stage": "test"}
        await admin._ask("put_bucket_versioning", VersioningConfiguration={"Status": "Enabled"})
        third = await admin.prepare()
        assert third.versioning == "Enabled"
        assert "old versions" in third.warnings[0]
        rules = (await admin._ask("get_bucket_lifecycle_configuration"))["Rules"]
        assert [rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"] for rule in rules] == [7]


async def test_b50_administration_tells_refusals_apart(seaweed, fake_s3):
    async with BucketAdmin.open(seaweed.settings(), Credentials("nobody", "secret")) as admin:
        with pytest.raises(Denied) as error:
            await admin.prepare()
        assert error.value.kind == "bad_credentials"
    fake_s3.on("*", times=9, status=403, code="RequestTimeTooSkewed")
    async with BucketAdmin.open(S3Settings(bucket="bucket", endpoint=fake_s3.endpoint), KEYS) as admin:
        with pytest.raises(KVTierError) as error:
            await admin.prepare()
        assert error.value.kind == "clock_skew"


async def test_b49_another_client_with_its_defaults_reads_the_same_bytes(seaweed, s3_store, root):
    bodies = {"small": os.urandom(1000), "large": os.urandom(2 << 20)}
    async with s3_store() as store, BucketAdmin.open(seaweed.settings(), seaweed.credentials) as admin:
        for name, body in bodies.items():
            await store.put(f"{root}/{name}", body, CREATE)
            answer = await admin._client.get_object(Bucket=seaweed.settings().bucket, Key=f"{root}/{name}")
            assert await answer["Body"].read() == body
            await admin._client.put_object(Bucket=seaweed.settings().bucket, Key=f"{root}/{name}-2", Body=body)
            assert (await store.get(f"{root}/{name}-2")).data == body


async def test_the_stores_clock_is_near_this_hosts(s3_store):
    async with s3_store() as store:
        assert abs(await store.now() - time.time()) < 5  # noqa: TID251  the host's clock is what it is compared with
