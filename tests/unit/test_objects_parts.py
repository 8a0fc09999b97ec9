"""The small parts under the stores: settings, signatures, documents, answers, and the gate."""

import asyncio
import datetime as dt
import subprocess
import sys

import obstore
import pytest

from kvstore.errors import KINDS, Invalid, KVTierError, Overloaded
from kvstore.objects import S3Settings
from kvstore.objects.answers import Refusal, refusal_in
from kvstore.objects.credentials import Credentials
from kvstore.objects.documents import deletion, parse_deletion, parse_page
from kvstore.objects.gate import ByteGate
from kvstore.objects.sessions import _client
from kvstore.objects.signing import encode_path, encode_query, sign

EXAMPLE = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize(
    ("path", "query", "headers", "signature"),
    [
        # The examples of AWS's own documentation, "Signature Calculations for the Authorization Header".
        ("/test.txt", [], {"range": "bytes=0-9"}, "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"),
        ("/", [("lifecycle", "")], {}, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        ("/", [("max-keys", "2"), ("prefix", "J")], {}, "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
)
def test_signatures_are_those_of_the_documentation(path, query, headers, signature):
    signed = sign(
        EXAMPLE,
        "us-east-1",
        method="GET",
        host="examplebucket.s3.amazonaws.com",
        path=encode_path(path),
        query=encode_query(query),
        headers=headers,
        payload=EMPTY,
        at=1369353600.0,
    )
    assert signed["authorization"].endswith(f"Signature={signature}")
    assert EXAMPLE.secret_key not in str(signed)


def test_a_session_token_is_signed():
    arguments = {"method": "GET", "host": "h", "path": "/", "query": "", "headers": {}, "payload": EMPTY, "at": 0.0}
    signed = sign(Credentials("a", "b", "token"), "r", **arguments)
    assert signed["x-amz-security-token"] == "token"
    assert "x-amz-security-token" in signed["authorization"]


def test_addresses_of_a_bucket():
    plain = S3Settings(bucket="data")
    assert (plain.address().url, plain.address().path) == ("https://s3.us-east-1.amazonaws.com", "/data")
    virtual = S3Settings(bucket="data", region="eu-west-1", addressing="virtual")
    assert (virtual.address().url, virtual.address().path) == ("https://data.s3.eu-west-1.amazonaws.com", "")
    local = S3Settings(bucket="data", endpoint="http://[::1]:8333")
    assert (local.address().url, local.address().authority) == ("http://[::1]:8333", "[::1]:8333")
    assert S3Settings(bucket="data", endpoint="https://minio.example:443/").address().authority == "minio.example"


@pytest.mark.parametrize(
    "fields",
    [
        {"addressing": "virtual"},
        {},
        {"addressing": "virtual", "endpoint": "https://minio.example:9000"},
        {"endpoint": "http://[::1]:1"},
    ],
)
def test_both_transports_ask_for_the_same_url(fields):
    settings = S3Settings(bucket="data", **fields)
    client = _client(settings, Credentials("id", "secret"), "", 5.0)
    signed = obstore.sign(client, "GET", "a b/世", dt.timedelta(seconds=9))
    assert signed.partition("?")[0] == f"{settings.address().url}{settings.address().path}/{encode_path('a b/世')}"


@pytest.mark.parametrize("host", ["127.0.0.1:8333", "localhost:9000", "[::1]", "127.1.2.3"])
def test_plain_http_is_for_loopback(host):
    assert not S3Settings(bucket="data", endpoint=f"http://{host}").address().tls


@pytest.mark.parametrize("host", ["192.0.2.1", "minio.internal:9000", "localhost.example.com", "0.0.0.0", "127.0.0.1.example.com"])
def test_plain_http_elsewhere_must_be_allowed(host):
    with pytest.raises(Invalid, match="allow_http"):
        S3Settings(bucket="data", endpoint=f"http://{host}")
    assert S3Settings(bucket="data", endpoint=f"http://{host}", allow_http=True).address().path == "/data"


@pytest.mark.parametrize(
    "fields",
    [
        {"bucket": "a/b"},
        {"bucket": ""},
        {"bucket": "../x"},
        {"bucket": "data", "endpoint": "ftp://x"},
        {"bucket": "data", "endpoint": "https://"},
        {"bucket": "data", "endpoint": "https://host:port"},
        {"bucket": "data", "endpoint": "https://host/path"},
        {"bucket": "data", "region": "a b"},
        {"bucket": "data", "timeout_s": 0.0},
        {"bucket": "data", "max_inflight_bytes": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(fields):
    with pytest.raises(Invalid):
        S3Settings(**fields)


def test_credentials_in_an_endpoint_are_refused_and_not_repeated():
    with pytest.raises(Invalid) as error:
        S3Settings(bucket="data", endpoint="https://id:hush@host")
    assert "hush" not in str(error.value)


def test_deadlines_grow_with_the_bytes():
    settings = S3Settings(bucket="data", timeout_s=10.0)
    assert settings.deadline_s(0) == 10.0
    assert settings.deadline_s(64 << 20) == 74.0


def test_every_kind_of_the_answers_exists():
    for code in ("SlowDown", "AccessDenied", "NoSuchBucket", "ExpiredToken", "RequestTimeTooSkewed", "Unheard", ""):
        for status in (0, 200, 301, 400, 401, 403, 404, 409, 412, 416, 429, 500, 501, 503):
            error = Refusal(status, code).error("GET k")
            assert isinstance(error, KINDS[error.kind].error)
            assert error.kind != "internal"


def test_an_obstore_error_is_read_by_status_and_code():
    said = "Object at location k already exists: Error performing PUT http://h/b/k in 1ms - Server returned non-2xx status code: "
    conflict = refusal_in(
        Exception(f"{said}409 Conflict: <Error><Code>ConditionalRequestConflict</Code></Error>\n\nDebug source:\nx")
    )
    assert (conflict.status, conflict.code) == (409, "ConditionalRequestConflict")
    assert refusal_in(Exception(f"{said}503 Service Unavailable: \n\nDebug source:\nx")).status == 503
    inside = refusal_in(Exception("x - Server returned error response: <Error><Code>SlowDown</Code></Error>"))
    assert (inside.status, inside.code) == (200, "SlowDown")
    late = refusal_in(Exception("HTTP error: error sending request\n\nDebug source:\nHttpError { kind: Timeout }"))
    assert late.error("GET k").kind == "timeout"
    assert refusal_in(Exception("anything else")).error("GET k").kind == "unavailable"


def test_a_deletion_escapes_its_keys_and_reads_errors_back():
    body, headers = deletion(["a&b", "<c>"])
    assert b"<Key>a&amp;b</Key>" in body
    assert b"<Key>&lt;c&gt;</Key>" in body
    assert headers["content-md5"]
    answer = (
        '<?xml version="1.0"?><DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        "<Error><Key>a&amp;b</Key><Code>InternalError</Code></Error><Error><Key>gone</Key><Code>NoSuchKey</Code></Error></DeleteResult>"
    )
    assert parse_deletion(answer, "DELETE") == ["a&b"]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "<",
        "<Other/>",
        "<Error><Code>SlowDown</Code></Error>",
        "<ListBucketResult><Contents><Key>k</Key></Contents></ListBucketResult>",
        "<ListBucketResult><Contents><Key>k</Key><Size>x</Size><ETag/><LastModified>now</LastModified></Contents></ListBucketResult>",
        '<!DOCTYPE l [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><ListBucketResult>&b;</ListBucketResult>',
    ],
)
def test_no_broken_document_is_an_empty_page(body):
    with pytest.raises(KVTierError):
        parse_page(body, "LIST")


async def test_the_gate_bounds_bytes_and_keeps_order():
    gate, order = ByteGate(100, 5.0), []

    async def use(name, size, release):
        async with gate.hold(size):
            order.append(name)
            await release.wait()

    releases = {name: asyncio.Event() for name in "abcd"}
    tasks = [asyncio.ensure_future(use(name, size, releases[name])) for name, size in zip("abcd", (60, 60, 30, 500), strict=True)]
    await asyncio.sleep(0)
    assert (order, gate.held) == (["a"], 60)  # c would fit, and waits its turn behind b
    releases["a"].set()
    await asyncio.sleep(0.01)
    assert (order, gate.held) == (["a", "b", "c"], 90)
    releases["b"].set()
    releases["c"].set()
    await asyncio.sleep(0.01)
    assert (order, gate.held) == (["a", "b", "c", "d"], 100)  # larger than the limit: alone
    releases["d"].set()
    await asyncio.gather(*tasks)
    assert gate.held == 0


async def test_the_gate_forgets_whoever_gives_up():
    gate = ByteGate(10, 5.0)
    async with gate.hold(10):
        waiting = [asyncio.ensure_future(gate.take(10)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[2].cancel()
        await asyncio.sleep(0)
    await waiting[1]
    assert gate.held == 10
    gate.give_back(10)
    third = asyncio.ensure_future(gate.take(10))
    await third
    late = asyncio.ensure_future(gate.take(4))
    await asyncio.sleep(0)
    gate.give_back(10)  # lets `late` through in the same instant as it is cancelled
    late.cancel()
    await asyncio.wait({late})
    assert gate.held == (0 if late.cancelled() else 4)


async def test_waiting_too_long_at_the_gate_is_overload():
    gate = ByteGate(10, 0.02)
    async with gate.hold(10):
        with pytest.raises(Overloaded):
            async with gate.hold(1):
                pass
    assert gate.held == 0
    async with gate.hold(10):
        assert gate.held == 10


def test_the_light_names_import_nothing_heavy():
    code = "import sys, kvstore.objects; print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert not loaded & {"obstore", "aiobotocore", "botocore", "boto3", "aiohttp", "torch", "lmdb"}
