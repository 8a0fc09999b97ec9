"""Credentials that rotate, trust, cancels, leaks and forks."""

import asyncio
import datetime as dt
import os
import ssl
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from fakes.fake_s3 import FakeS3, etag

from kvstore.errors import Corrupt, Denied, Invalid, Unavailable
from kvstore.objects import ABSENT, CREATE, OVERWRITE, UNCHANGED, S3Settings, S3Store, Stored
from kvstore.objects.admin import BucketAdmin
from kvstore.objects.credentials import Credentials
from kvstore.objects.s3 import LARGE, LARGE_TLS

BIG = os.urandom(2 << 20)


def old_then_new():
    """A source of credentials that hands out `new` from its second call on."""
    given = []

    def look_up():
        given.append(Credentials("new" if given else "old", "secret"))
        return given[-1]

    look_up.given = given
    return look_up


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.get("k"),
        lambda store: store.get("k", into=memoryview(bytearray(2 << 20))),
        lambda store: store.head("k"),
        lambda store: store.put("new", b"x", CREATE),
        lambda store: store.put("new", BIG, CREATE),
        lambda store: store.delete(["other"]),
        lambda store: anext(store.list("")),
    ],
    ids=["get", "get-large", "head", "put", "put-large", "delete", "list"],
)
async def test_b50_rotated_credentials_need_no_restart(fake_s3, fake_store, code, call):
    source = old_then_new()
    fake_s3.keys = {"old": "", "new": ""}
    fake_s3.objects["k"] = (BIG, 1e9)
    async with fake_store(credentials=source) as store:
        await store.put("warm", b"x", CREATE)
        fake_s3.keys = {"old": code, "new": ""}
        await call(store)
    assert [keys.access_key for keys in source.given] == ["old", "new"]


async def test_b50_rejected_credentials_without_newer_ones_are_an_error_and_no_storm(fake_s3, fake_store):
    looked = []

    def stubborn():
        looked.append(1)
        return Credentials("old", "secret")

    fake_s3.keys = {"other": ""}
    async with fake_store(credentials=stubborn) as store:
        answers = await asyncio.gather(*(store.get("k") for _ in range(50)), return_exceptions=True)
    assert {error.kind for error in answers} == {"bad_credentials"}
    assert len(looked) == 2
    assert len(fake_s3.seen) == 50


async def test_b50_no_credentials_is_an_error_of_its_own(fake_s3, fake_store, monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    async with fake_store(credentials=None) as store:
        with pytest.raises(Denied) as error:
            await store.get("k")
    assert error.value.kind == "no_credentials"
    assert fake_s3.seen == []


@pytest.fixture
def certificate(tmp_path):
    """PEM paths of an authority, of a certificate for localhost that it signed, of that one's key, and of another authority."""
    now = dt.datetime.now(dt.UTC)

    def sign(subject, issuer, public_key, by, *, authority):
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (subject, issuer)]
        builder = (
            x509.CertificateBuilder()
            .subject_name(names[0])
            .issuer_name(names[1])
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        )
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    root, key, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    files = {
        "ca.pem": sign("kvtier test authority", "kvtier test authority", root.public_key(), root, authority=True),
        "cert.pem": sign("localhost", "kvtier test authority", key.public_key(), root, authority=False),
        "key.pem": key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        "other.pem": sign("kvtier test authority", "kvtier test authority", other.public_key(), other, authority=True),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return [tmp_path / name for name in files]


@pytest.fixture
def tls_s3(certificate):
    """A server that speaks TLS under that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[2])
    fake = FakeS3()
    fake.start(context)
    yield fake
    fake.stop()


async def test_a_private_authority_is_trusted_only_when_named(certificate, tls_s3):
    authority, _, private, _ = certificate
    settings = {"bucket": "bucket", "endpoint": tls_s3.endpoint, "timeout_s": 5.0}
    keys = lambda: Credentials("key", "secret")  # noqa: E731  a source of credentials is a function
    async with S3Store.open(S3Settings(**settings, ca_bundle=str(authority)), credentials=keys) as store:
        assert isinstance(await store.put("small", b"x", CREATE), Stored)
        assert isinstance(await store.put("large", BIG, CREATE), Stored)
        assert (await store.get("large", into=memoryview(bytearray(len(BIG))))).data == BIG
        assert bytes((await store.get("small")).data) == b"x"
    with pytest.raises(Invalid):
        async with S3Store.open(S3Settings(**settings, ca_bundle=str(private)), credentials=keys):
            pass


@pytest.fixture
async def tls_store(certificate, tls_s3):
    settings = S3Settings(bucket="bucket", endpoint=tls_s3.endpoint, timeout_s=5.0, ca_bundle=str(certificate[0]))
    async with S3Store.open(settings, credentials=lambda: Credentials("key", "secret")) as store:
        yield store


# Over TLS, both ways of a large body: through obstore and a copy, and through sockets of our own.
BOTH_WAYS = pytest.mark.parametrize("size", [LARGE + 1000, LARGE_TLS], ids=["obstore", "sockets"])


@BOTH_WAYS
async def test_what_comes_over_tls_is_told_by_slices_and_not_by_records(tls_s3, tls_store, size):
    body, told = os.urandom(size), []
    tls_s3.objects["k"] = (body, 1e9)
    into = memoryview(bytearray(size))
    got = await tls_store.get("k", into=into, arrived=lambda *span: told.append((*span, bytes(into[slice(*span)]))))
    spans = [span for span in told if span[:2] != (0, 0)]
    assert [start for start, _, _ in spans] == [0, *(end for _, end, _ in spans[:-1])]
    assert b"".join(there for _, _, there in spans) == body == got.data
    assert len(spans) <= size // LARGE + 2
    assert (got.etag, got.size, got.modified) == (etag(body), size, 1e9)


@BOTH_WAYS
async def test_over_tls_an_answer_that_is_not_what_was_asked_for_is_none(tls_s3, tls_store, size):
    body = os.urandom(size + 100)
    tls_s3.objects["k"] = (body, 1e9)
    into = memoryview(bytearray(size + 100))

    async def ask(**how):
        tls_s3.on("GET", **how)
        return await tls_store.get("k", into=into)

    assert (await tls_store.get("k", into=into, range=(50, 50 + size))).data == body[50 : 50 + size]
    assert await tls_store.get("k", into=into, if_none_match=etag(body)) is UNCHANGED
    assert await tls_store.get("absent", into=into) is ABSENT
    assert (await ask(headers={"Transfer-Encoding": "chunked"})).data == body
    for how in ({"truncate": size // 2}, {"status": 200, "headers": {"ETag": ""}, "drop": "after"}):
        with pytest.raises(Unavailable):
            await ask(**how)
    room = memoryview(bytearray(size))
    with pytest.raises(Corrupt):
        await tls_store.get("k", into=room)
    assert not any(room[:: 1 << 10])
    tls_s3.on("GET", headers={"Content-Range": f"bytes 0-{size - 1}/{len(body)}"})
    with pytest.raises(Unavailable):
        await tls_store.get("k", into=into, range=(50, 50 + size))
    with pytest.raises(Unavailable) as error:
        await ask(status=503, code="SlowDown")
    assert error.value.kind == "store_busy"
    assert tls_store.window.shrunk["busy"] == 1
    assert tls_store.window.gate.held == 0


@BOTH_WAYS
async def test_over_tls_a_cancelled_read_writes_no_more_when_it_is_over(tls_s3, tls_store, size):
    tls_s3.objects["k"] = (os.urandom(size), 1e9)
    into = memoryview(bytearray(size))
    coming, release = threading.Event(), threading.Event()

    def arrived(start, end):
        if end:
            coming.set()
            release.wait()

    reading = asyncio.create_task(tls_store.get("k", into=into, arrived=arrived))
    await asyncio.to_thread(coming.wait)
    reading.cancel()
    await asyncio.sleep(0.05)
    assert not reading.done()
    assert tls_store.window.gate.held == size
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert tls_store.window.gate.held == 0
    seen = bytes(into)
    await asyncio.sleep(0.05)
    assert seen == into


@pytest.mark.parametrize("why", ["no authority", "another authority", "another host"])
async def test_a_server_that_is_not_who_it_should_be_is_refused(certificate, tls_s3, why):
    bundle = {"no authority": "", "another authority": str(certificate[3]), "another host": str(certificate[0])}[why]
    endpoint = tls_s3.endpoint.replace("localhost", "127.0.0.1") if why == "another host" else tls_s3.endpoint
    settings = S3Settings(bucket="bucket", endpoint=endpoint, timeout_s=5.0, ca_bundle=bundle)
    async with S3Store.open(settings, credentials=lambda: Credentials("key", "secret")) as store:
        for into in (None, memoryview(bytearray(len(BIG)))):
            with pytest.raises(Unavailable) as error:
                await store.get("large", into=into)
            assert error.value.kind == "untrusted_certificate"
            assert "ca_bundle" in error.value.remedy
    assert tls_s3.seen == []


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_b47_five_hundred_cancels_leak_nothing(seaweed, s3_store, root):
    async with s3_store(connections=10) as store:
        buffers = [bytearray(2 << 20) for _ in range(10)]
        await store.put(f"{root}/k", BIG, CREATE)
        await asyncio.gather(*(store.get(f"{root}/k", into=memoryview(buffer)) for buffer in buffers))
        await asyncio.gather(*(store.get(f"{root}/k", range=(0, 100)) for _ in range(10)))
        baseline = open_descriptors()
        for n in range(50):
            reads = [asyncio.ensure_future(store.get(f"{root}/k", into=memoryview(buffer))) for buffer in buffers[:7]]
            reads += [asyncio.ensure_future(store.get(f"{root}/k", range=(0, 1000))) for _ in range(2)]
            reads += [asyncio.ensure_future(store.put(f"{root}/p{n}", BIG, OVERWRITE))] if n % 10 == 0 else []
            await asyncio.sleep((n % 10) * 0.0003)
            for read in reads:
                read.cancel()
            await asyncio.wait(reads)
        assert (await store.get(f"{root}/k", into=memoryview(buffers[0]))).data == BIG
        assert store.window.gate.held == 0
        assert store._under_way == 0
        assert open_descriptors() <= baseline + 12  # obstore opens a few kept connections of its own
    async with BucketAdmin.open(seaweed.settings(), seaweed.credentials) as admin:
        assert await admin.open_uploads() == 0


async def test_closing_waits_for_what_is_under_way(fake_s3, fake_store):
    release = threading.Event()
    fake_s3.on("PUT", times=2, until=release)
    async with fake_store() as store:
        puts = [asyncio.ensure_future(store.put(f"k{n}", body, CREATE)) for n, body in enumerate((b"x", BIG))]
        await asyncio.sleep(0.05)
        closing = asyncio.ensure_future(store.aclose())
        await asyncio.sleep(0.05)
        assert not closing.done()
        release.set()
        await closing
        assert all(isinstance(put.result(), Stored) for put in puts)


FORKED = """
    import asyncio, os, sys, time
    from kvstore.errors import Closed
    from kvstore.objects import CREATE, S3Settings, S3Store
    from kvstore.objects.credentials import Credentials

    settings = S3Settings(bucket="bucket", endpoint=sys.argv[1])
    keys = lambda: Credentials("key", "secret")

    async def child(store):
        kinds = []
        for call in (lambda: store.get("k"), lambda: store.get("k", into=memoryview(bytearray(2 << 20))), lambda: store.head("k"),
                     lambda: store.put("k", b"x", CREATE), lambda: store.now(), lambda: anext(store.list("")),
                     lambda: store.delete(["k"]), lambda: S3Store.open(settings, credentials=keys).__aenter__()):
            try:
                await call()
            except Closed as error:
                kinds.append(error.kind)
        await store.aclose()
        return kinds

    async def main():
        async with S3Store.open(settings, credentials=keys) as store:
            await store.put("k", b"x", CREATE)
            await store.put("large", bytes(2 << 20), CREATE)
            pid = os.fork()
            if pid == 0:
                asyncio._set_running_loop(None)
                told = asyncio.run(child(store)) == ["forked"] * 8
                os._exit(0 if told else 7)  # as multiprocessing ends a child
            end = time.monotonic() + 5
            while time.monotonic() < end:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    break
                time.sleep(0.02)
            else:
                os.kill(pid, 9)
                sys.exit(8)
            assert bytes((await store.get("k")).data) == b"x"  # the parent goes on
            sys.exit(os.waitstatus_to_exitcode(status))

    asyncio.run(main())
"""


def test_b48_a_forked_child_is_told_within_five_seconds(fake_s3):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKED), fake_s3.endpoint], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
