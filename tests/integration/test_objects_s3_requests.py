"""What S3Store sends and what it makes of the answers, against a scripted server."""

import asyncio
import os
import threading

import pytest

from kvstore.clock import SeededIds, VirtualClock
from kvstore.errors import Corrupt, Denied, Invalid, Overloaded, Unavailable, Unsupported
from kvstore.objects import (
    ABSENT,
    CREATE,
    OVERWRITE,
    REFUSED,
    RetryingStore,
    RetrySettings,
    Stored,
    Update,
)

SMALL, BIG = b"small", os.urandom(2 << 20)
FAILURES = {
    "store_busy": {"status": 503, "code": "SlowDown"},
    "unavailable": {"status": 500, "code": "InternalError"},
    "store_conflict": {"status": 409, "code": "ConditionalRequestConflict"},
    "store_busy-429": {"status": 429, "code": "TooManyRequests"},
    "unavailable-drop": {"drop": "before"},
    "unavailable-lost": {"drop": "after"},
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("mode", [CREATE, OVERWRITE, "update"], ids=["create", "overwrite", "update"])
@pytest.mark.parametrize("body", [SMALL, BIG], ids=["small", "large"])
async def test_no_put_is_sent_twice_behind_the_callers_back(fake_s3, fake_store, failure, mode, body):
    async with fake_store() as store:
        if mode == "update":
            mode = Update((await store.put("k", b"before", CREATE)).etag)
            fake_s3.seen.clear()
        fake_s3.on("PUT", **FAILURES[failure])
        with pytest.raises(Unavailable) as error:
            await store.put("k", body, mode)
        assert error.value.kind == failure.partition("-")[0]
        await asyncio.sleep(0.05)
    assert fake_s3.count("PUT") == 1


@pytest.mark.parametrize("body", [SMALL, BIG], ids=["small", "large"])
async def test_a_412_is_a_refusal_and_a_409_is_not(fake_s3, fake_store, body):
    async with fake_store() as store:
        await store.put("k", b"there", CREATE)
        assert await store.put("k", body, CREATE) == REFUSED
        assert await store.put("k", body, Update('"other"')) == REFUSED
        assert await store.put("absent", body, Update('"other"')) == REFUSED  # AWS says 404 here
        for mode in (CREATE, Update('"other"')):
            fake_s3.on("PUT", status=409, code="ConditionalRequestConflict")
            with pytest.raises(Unavailable) as error:
                await store.put("k", body, mode)
            assert error.value.kind == "store_conflict"


async def test_b46_a_slowdown_inside_a_200_is_an_error(fake_s3, fake_store):
    async with fake_store() as store:
        await store.put("k", SMALL, CREATE)

        async def listing():
            return [page async for page in store.list("")]

        for verb, kind, attempt in (
            ("PUT", "unavailable", lambda: store.put("p", SMALL, CREATE)),  # obstore sees only that the ETag is missing
            ("PUT", "store_busy", lambda: store.put("p", BIG, CREATE)),
            ("COPY", "store_busy", lambda: store.copy("k", "c")),
            ("POST", "store_busy", lambda: store.delete(["k", "l"])),
            ("LIST", "store_busy", listing),
        ):
            fake_s3.on(verb, status=200, code="SlowDown")
            with pytest.raises(Unavailable) as error:
                await attempt()
            assert error.value.kind == kind
        assert [page[0].key for page in await listing()] == ["k"]


async def test_a_foreign_document_is_never_an_empty_listing(fake_s3, fake_store):
    async with fake_store() as store:
        for body in (
            b"<html><body>welcome</body></html>",
            b"",
            b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
        ):
            fake_s3.on("LIST", body=body)
            with pytest.raises(Unavailable):
                [page async for page in store.list("")]
        entity = b'<!DOCTYPE x [<!ENTITY a "b">]><ListBucketResult>&a;</ListBucketResult>'
        fake_s3.on("LIST", body=entity)
        with pytest.raises(Unavailable):
            [page async for page in store.list("")]


async def test_a_repeated_page_ends_in_an_error_and_not_in_a_loop(fake_s3, fake_store):
    page = b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken></ListBucketResult>"
    fake_s3.on("LIST", times=9, body=page)
    async with fake_store() as store:
        with pytest.raises(Unavailable, match="repeats"):
            [page async for page in store.list("")]
    assert fake_s3.count("LIST") == 2


@pytest.mark.parametrize("body", [SMALL, BIG], ids=["small", "large"])
async def test_b35_a_retried_put_carries_the_same_body(fake_s3, fake_store, body):
    fake_s3.on("PUT", status=503, code="SlowDown")
    async with fake_store() as store:
        retrying = RetryingStore(store, VirtualClock(), SeededIds(1))
        assert isinstance(await retrying.put("k", body, OVERWRITE), Stored)
    first, second = fake_s3.seen
    assert (first.size, first.digest) == (second.size, second.digest) == (len(body), second.digest)
    assert second.body == body


async def test_b46_a_hundred_retrying_clients_send_at_most_twice_the_requests(fake_s3, fake_store):
    fake_s3.on("*", times=10_000, status=503, code="SlowDown")
    async with fake_store() as store:
        clients = [RetryingStore(store, VirtualClock(), SeededIds(n), RetrySettings(deadline_s=300.0)) for n in range(100)]
        answers = await asyncio.gather(*(client.get("k") for client in clients), return_exceptions=True)
        assert {type(answer) for answer in answers} == {Unavailable}
        assert len(fake_s3.seen) == 200
        fake_s3.seen.clear()
        one = RetryingStore(store, VirtualClock(), SeededIds(0))
        await asyncio.gather(*(one.head("k") for _ in range(100)), return_exceptions=True)
        assert 100 < len(fake_s3.seen) <= 200


async def test_a_64_mib_put_is_one_request(fake_s3, fake_store):
    body = bytes(64 << 20)
    async with fake_store(timeout_s=60.0) as store:
        assert isinstance(await store.put("k", body, CREATE), Stored)
    (request,) = fake_s3.seen
    assert (request.method, request.query, request.size) == ("PUT", {}, len(body))


async def test_b52_one_undeletable_key_is_told_apart(fake_s3, fake_store):
    keys = [f"k{n}" for n in range(10)]
    fake_s3.undeletable = {"k3"}
    async with fake_store() as store:
        for key in keys:
            await store.put(key, SMALL, CREATE)
        fake_s3.seen.clear()
        assert await store.delete(keys) == ["k3"]
        assert set(fake_s3.objects) == {"k3"}
        fake_s3.undeletable = set()
        assert await store.delete(["k3"]) == []
    assert fake_s3.count("POST") == 2
    assert "content-md5" in fake_s3.seen[0].headers


async def test_a_missing_bucket_is_not_a_missing_key(fake_s3, fake_store):
    async with fake_store(bucket="nowhere") as store:
        for call in (
            lambda: store.get("k"),
            lambda: store.get("k", into=memoryview(bytearray(2 << 20))),
            lambda: store.head("k"),
            lambda: store.put("k", SMALL, CREATE),
            lambda: store.put("k", BIG, CREATE),
            lambda: store.copy("k", "l"),
            lambda: anext(store.list("")),
            lambda: store.delete(["k"]),
        ):
            with pytest.raises(Unavailable) as error:
                await call()
            assert error.value.kind == "no_bucket"


async def test_a_bucket_that_vanishes_is_noticed_by_heads_too(fake_s3, fake_store):
    clock = VirtualClock()
    async with fake_store() as store:
        store._clock = clock
        assert await store.get("k") == ABSENT
        fake_s3.seen.clear()
        for _ in range(5):
            assert await store.head("k") == ABSENT
        assert [request.method for request in fake_s3.seen] == ["HEAD"] * 5  # no second request per absent key
        fake_s3.buckets.clear()
        clock.advance(60)
        with pytest.raises(Unavailable) as error:
            await store.head("k")
        assert error.value.kind == "no_bucket"


async def test_a_404_from_something_that_is_no_s3_is_not_a_miss(fake_s3, fake_store):
    fake_s3.on("*", times=9, status=404, code="", body=b"<html>nginx</html>")
    async with fake_store() as store:
        for call in (
            lambda: store.get("k"),
            lambda: store.head("k"),
            lambda: store.get("k", into=memoryview(bytearray(2 << 20))),
        ):
            with pytest.raises(Unavailable):
                await call()


REFUSALS = {
    "AccessDenied": (403, Denied, "access_denied"),
    "InvalidAccessKeyId": (403, Denied, "bad_credentials"),
    "SignatureDoesNotMatch": (403, Denied, "bad_credentials"),
    "ExpiredToken": (400, Denied, "expired_credentials"),
    "RequestTimeTooSkewed": (403, Unavailable, "clock_skew"),
    "PermanentRedirect": (301, Invalid, "wrong_region"),
    "NotImplemented": (501, Unsupported, "unsupported"),
}


@pytest.mark.parametrize("code", REFUSALS)
async def test_b50_refusals_are_told_apart_by_every_call(fake_s3, fake_store, code):
    status, error_type, kind = REFUSALS[code]
    fake_s3.on("*", times=100, status=status, code=code)
    async with fake_store() as store:
        for call in (
            lambda: store.get("k"),
            lambda: store.get("k", into=memoryview(bytearray(2 << 20))),
            lambda: store.head("absent"),  # 403 for an absent key is no miss
            lambda: store.put("k", SMALL, CREATE),
            lambda: store.put("k", BIG, CREATE),
            lambda: anext(store.list("")),
            lambda: store.delete(["k"]),
        ):
            with pytest.raises(error_type) as error:
                await call()
            assert error.value.kind == kind
            assert "secret" not in str(error.value)


@pytest.mark.parametrize("size", [1000, 2 << 20])
async def test_a_body_that_ends_early_is_no_answer(fake_s3, fake_store, size):
    fake_s3.objects["k"] = (os.urandom(size), 1e9)
    async with fake_store() as store:
        for into in (memoryview(bytearray(size)), None):
            fake_s3.on("GET", truncate=size // 2)
            with pytest.raises(Unavailable):
                await store.get("k", into=into)


@pytest.mark.parametrize("size", [1000, 2 << 20])
async def test_b37_content_encoding_changes_no_byte(fake_s3, fake_store, size):
    body = b"\x1f\x8b" + os.urandom(size)
    async with fake_store() as store:
        await store.put("k", body, CREATE)
        assert not any("encoding" in name for request in fake_s3.seen for name in request.headers)
        fake_s3.on("GET", times=2, headers={"Content-Encoding": "gzip"})
        assert (await store.get("k", into=memoryview(bytearray(len(body))))).data == body
        assert (await store.get("k")).data == body
        # A proxy that decoded the body sends more bytes, in chunks, without saying how many.
        fake_s3.on("GET", headers={"Transfer-Encoding": "chunked"}, body=body * 2)
        with pytest.raises((Corrupt, Unavailable)):
            await store.get("k", into=memoryview(bytearray(len(body))))


async def test_b37_a_body_of_unsaid_length_is_read_whole(fake_s3, fake_store):
    fake_s3.objects["k"] = (BIG, 1e9)
    fake_s3.on("GET", times=2, headers={"Transfer-Encoding": "chunked"})
    async with fake_store() as store:
        for room in (len(BIG), len(BIG) + 100):
            assert (await store.get("k", into=memoryview(bytearray(room)))).data == BIG


async def test_every_call_has_a_deadline(fake_s3, fake_store):
    release = threading.Event()
    fake_s3.on("*", times=100, until=release)
    async with fake_store(timeout_s=0.2) as store:
        calls = [
            lambda: store.get("k", into=memoryview(bytearray(1000))),
            lambda: store.head("k"),
            lambda: store.copy("k", "l"),
            lambda: store.delete(["k"]),
            store.now,
            lambda: anext(store.list("")),
            lambda: store.put("p", b"x" * 100, CREATE),
        ]
        for call in calls:
            with pytest.raises(Unavailable) as error:
                await asyncio.wait_for(call(), 20)
            assert error.value.kind == "timeout"
        release.set()


async def test_a_stalled_large_transfer_is_cut_at_its_deadline(fake_s3, fake_store, monkeypatch):
    release = threading.Event()
    fake_s3.objects["k"] = (bytes(1 << 20), 1e9)
    async with fake_store(timeout_s=0.2) as store:
        monkeypatch.setattr(type(store._direct._settings), "deadline_s", lambda self, nbytes: 0.2)
        fake_s3.on("*", times=2, until=release)
        buffer = bytearray(1 << 20)
        for call in (lambda: store.get("k", into=memoryview(buffer)), lambda: store.put("p", BIG, CREATE)):
            with pytest.raises(Unavailable) as error:
                await asyncio.wait_for(call(), 20)
            assert error.value.kind == "timeout"
        release.set()
        await asyncio.sleep(0.05)
        assert not any(buffer)


async def test_a_request_that_never_got_its_turn_says_nothing_about_the_store(fake_s3, fake_store):
    release = threading.Event()
    async with fake_store(connections=1, timeout_s=0.5) as store:
        fake_s3.on("*", times=1, until=release)
        calls = [store.put("first", BIG * 2, CREATE), store.put("second", BIG, CREATE)]  # the larger one has the later deadline
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, Unavailable)
        assert first.kind == "timeout"
        assert isinstance(second, Overloaded)
        assert [seen.key for seen in fake_s3.seen] == ["first"]
        release.set()


async def test_a_kept_connection_that_died_is_replaced(fake_s3, fake_store):
    fake_s3.objects["k"] = (BIG, 1e9)
    buffer = memoryview(bytearray(len(BIG)))
    async with fake_store() as store:
        for _ in range(3):
            assert (await store.get("k", into=buffer)).data == BIG
        assert fake_s3.connections == 1
        fake_s3.on("GET", drop="before")  # the server hangs up on a connection it had kept
        assert (await store.get("k", into=buffer)).data == BIG
        assert fake_s3.connections == 2
        fake_s3.on("PUT", drop="before")
        with pytest.raises(Unavailable):
            await store.put("p", BIG, CREATE)
    assert fake_s3.count("PUT") == 1


async def test_the_environment_does_not_leak_into_requests(fake_s3, fake_store, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "leaked")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with fake_store() as store:
        await store.put("k", SMALL, CREATE)
        await store.get("k")
        await store.put("l", BIG, CREATE)
    assert len(fake_s3.seen) == 3
    for request in fake_s3.seen:
        assert "x-amz-security-token" not in request.headers
        assert "Credential=key/" in request.headers["authorization"]


async def test_bytes_in_flight_are_bounded(fake_s3, fake_store):
    release = threading.Event()
    fake_s3.on("PUT", times=20, until=release)
    async with fake_store(max_inflight_bytes=4 << 20, timeout_s=20.0) as store:
        puts = [asyncio.ensure_future(store.put(f"k{n}", BIG, CREATE)) for n in range(6)]
        while fake_s3.count("PUT") < 2:  # noqa: ASYNC110  the server runs in threads
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert fake_s3.count("PUT") == 2
        release.set()
        assert all(isinstance(done, Stored) for done in await asyncio.gather(*puts))


async def test_the_clock_is_the_stores(fake_s3, fake_store):
    fake_s3.skew = 3600.0
    async with fake_store() as store:
        ahead = await store.now()
        fake_s3.skew = 0.0
        assert ahead - await store.now() == pytest.approx(3600, abs=2)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Content-Range": f"bytes 0-{(1 << 20) - 1}/{len(BIG)}"}, BIG[: 1 << 20]),  # another part
        ({}, BIG[1 << 19 : 1 << 20]),  # less than it says, and the rest of the reader's memory is what was there before
        (
            {"Content-Range": f"bytes {1 << 19}-{(1 << 20) - 1}/{1 << 20}"},
            BIG[1 << 19 : 1 << 20],
        ),  # of a shorter object: as it says
        ({"Content-Range": "bytes */9"}, None),
        ({"Content-Range": "9"}, None),
    ],
    ids=["another", "part", "shorter", "unsatisfied", "nonsense"],
)
async def test_another_range_than_the_one_asked_for_is_no_answer(fake_s3, fake_store, headers, body, request):
    start, end = 1 << 19, (1 << 19) + (1 << 20)
    async with fake_store() as store:
        await store.put("k", BIG, OVERWRITE)
        into = memoryview(bytearray(end - start))
        fake_s3.on("GET", headers=headers, body=body)
        if "shorter" in request.node.name:
            got = await store.get("k", range=(start, end), into=into)
            assert (got.size, bytes(got.data)) == (1 << 20, body)
        else:
            with pytest.raises(Unavailable):
                await store.get("k", range=(start, end), into=into)
        assert bytes((await store.get("k", range=(start, end), into=into)).data) == BIG[start:end]
