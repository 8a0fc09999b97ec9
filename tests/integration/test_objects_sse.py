"""Server-side encryption: every way that writes asks for it, and a store that does not do it is told apart at start."""

import os

import pytest

from kvstore.errors import Invalid, Unsupported
from kvstore.objects import CREATE, OVERWRITE, Got, S3Settings, Update

SMALL, BIG = b"small", os.urandom(2 << 20)
ASKED = "x-amz-server-side-encryption"


@pytest.mark.parametrize(
    ("sse", "key", "said"), [("s3", "", "AES256"), ("kms", "", "aws:kms"), ("kms", "arn:aws:kms:eu:1:key/a-b", "aws:kms")]
)
@pytest.mark.parametrize("body", [SMALL, BIG], ids=["small", "large"])
async def test_every_write_asks_and_no_read_does(fake_s3, fake_store, body, sse, key, said):
    async with fake_store(sse=sse, sse_kms_key=key) as store:
        made = await store.put("k", body, CREATE)
        await store.put("k", body + b"x", Update(made.etag))
        await store.put("k", body, OVERWRITE)
        assert await store.copy("k", "l")
        assert isinstance(await store.get("l", into=memoryview(bytearray(len(body)))), Got)
        await store.head("l")
        await store.delete(["k", "l"])
    writes = [seen for seen in fake_s3.seen if seen.verb in {"PUT", "COPY"}]
    assert [seen.headers.get(ASKED) for seen in writes] == [said] * 4
    assert [seen.headers.get(f"{ASKED}-aws-kms-key-id") for seen in writes] == [key or None] * 4
    assert not any(ASKED in seen.headers for seen in fake_s3.seen if seen not in writes)


async def test_without_it_nothing_is_asked(fake_s3, fake_store):
    async with fake_store() as store:
        for body in (SMALL, BIG):
            await store.put("k", body, OVERWRITE)
        await store.check_encryption("probe/x")
    assert len(fake_s3.seen) == 2
    assert not any(ASKED in name for seen in fake_s3.seen for name in seen.headers)


async def test_a_store_that_takes_the_write_and_does_not_say_that_it_encrypts_is_refused(fake_store):
    async with fake_store(sse="s3") as store:
        with pytest.raises(Unsupported, match="says nothing"):
            await store.check_encryption("probe/x")


async def test_seaweedfs_encrypts_with_its_own_key_and_refuses_a_key_service_that_it_has_not(s3_store, root):
    async with s3_store(sse="s3") as store:
        await store.check_encryption(f"{root}/probe/x")
        for name, body in (("small", SMALL), ("large", BIG)):
            made = await store.put(f"{root}/{name}", body, CREATE)
            assert await store.copy(f"{root}/{name}", f"{root}/{name}-copy")
            into = memoryview(bytearray(len(body)))
            assert isinstance(await store.get(f"{root}/{name}-copy", into=into), Got)
            assert bytes(into) == body
            assert await store.put(f"{root}/{name}", b"next", Update(made.etag))
    async with s3_store(sse="kms") as store:
        with pytest.raises(Unsupported, match="kms"):
            await store.check_encryption(f"{root}/probe/x")


def test_a_key_goes_with_the_key_service():
    for fields in ({"sse_kms_key": "k"}, {"sse": "s3", "sse_kms_key": "k"}, {"sse": "kms", "sse_kms_key": "a\r\nb"}):
        with pytest.raises(Invalid, match="sse_kms_key"):
            S3Settings(bucket="abc", **fields)
