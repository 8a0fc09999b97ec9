"""S3 requests on sockets of our own: large bodies, and what obstore would hide (listings, batch deletions, error texts, Date)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Final

from kvstore.clock import Clock
from kvstore.objects.answers import Refusal, no_answer, put_outcome
from kvstore.objects.base import (
    ABSENT,
    PAGE,
    UNCHANGED,
    Absent,
    Arrived,
    Buffer,
    Create,
    Got,
    ObjectMeta,
    PutMode,
    Refused,
    Stored,
    Unchanged,
    Update,
)
from kvstore.objects.credentials import Credentials
from kvstore.objects.documents import MOST_BYTES, Page, deletion, parse_deletion, parse_page
from kvstore.objects.http1 import Answer
from kvstore.objects.settings import S3Settings
from kvstore.objects.signing import UNSIGNED, encode_path, encode_query, sign
from kvstore.objects.sockets import Request, Sockets

_ERROR_BYTES: Final = 64 << 10


class Direct:
    """Signs requests and reads their answers.

    Args:
        settings: Where the bucket is.
        sockets: Connections to it.
        clock: Host's clock, for signatures.
    """

    def __init__(self, settings: S3Settings, sockets: Sockets, clock: Clock) -> None:
        self._settings, self._sockets, self._clock = settings, sockets, clock
        self._address = settings.address()

    async def get(
        self,
        key: str,
        span: tuple[int, int] | None,
        target: memoryview,
        if_none_match: str | None,
        credentials: Credentials,
        arrived: Arrived | None = None,
    ) -> Got | Absent | Unchanged | None:
        """As the contract's `get`, into memory of the caller; None where the range holds no bytes (416)."""
        what, headers = f"GET {key}", {"accept-encoding": "identity"}
        if span:
            headers["range"] = f"bytes={span[0]}-{span[1] - 1}"
        if if_none_match:
            headers["if-none-match"] = if_none_match
        answer = await self._ask("GET", key, credentials, headers=headers, into=target, arrived=arrived)
        if answer.status == (206 if span else 200):
            meta = _meta(key, answer)
            if span and answer.headers["content-range"] != _range(span[0], min(span[1], meta.size), meta.size):
                raise no_answer(what, "the store answered with another range than the one asked for")
            if span and len(answer.body) != min(span[1], meta.size) - span[0]:
                raise no_answer(what, "the store answered with a part of the range")
            return Got(answer.body, meta.etag, meta.size, meta.modified)
        if answer.status in {200, 206}:
            raise no_answer(what, "the store ignores Range")
        if answer.status in {304, 416}:
            return UNCHANGED if answer.status == 304 else None
        return _absent(answer, what)

    async def first_byte(self, key: str, credentials: Credentials) -> ObjectMeta | Absent:
        """A HEAD whose refusals say what they mean, at the price of a byte."""
        answer = await self._ask("GET", key, credentials, headers={"range": "bytes=0-0"})
        return _meta(key, answer) if answer.status == 206 else _absent(answer, f"HEAD {key}")

    async def put(self, key: str, body: memoryview, mode: PutMode, credentials: Credentials) -> Stored | Refused:
        """As the contract's `put`, in one request."""
        headers = {"content-type": "application/octet-stream"} | self._settings.encryption_headers()
        if isinstance(mode, Create):
            headers["if-none-match"] = "*"
        elif isinstance(mode, Update):
            headers["if-match"] = mode.etag
        answer = await self._ask("PUT", key, credentials, headers=headers, body=body, payload=UNSIGNED)
        refusal = Refusal.parse(answer.status, answer.text)
        if answer.status == 200 and not refusal.code and "etag" in answer.headers:
            return Stored(answer.headers["etag"])
        return put_outcome(refusal, mode, f"PUT {key}")

    async def encrypts(self, key: str, credentials: Credentials) -> str:
        """What keeps the store from encrypting a write as `sse` asks; empty where nothing does. Leaves an object at `key`.

        Raises:
            KVTierError: It takes no write at all, encrypted or not.
        """
        headers, body = self._settings.encryption_headers(), key.encode()
        asked = await self._ask("PUT", key, credentials, headers=headers, body=body)
        if asked.status == 200:
            said = asked.headers.get("x-amz-server-side-encryption", "")
            return "" if said == self._settings.encryption else f"it took a write and says {said or 'nothing'} of its encryption"
        plain = await self._ask("PUT", key, credentials, body=body)
        if plain.status != 200:
            raise Refusal.parse(plain.status, plain.text).error(f"PUT {key}")
        return Refusal.parse(asked.status, asked.text).error("it refuses such writes").message

    async def page(self, prefix: str, start_after: str, token: str, credentials: Credentials) -> Page:
        """A page of a listing: the first one after `start_after`, or the one that `token` continues."""
        query = [("list-type", "2"), ("max-keys", str(PAGE)), ("encoding-type", "url"), ("prefix", prefix)]
        if token or start_after:
            query.append(("continuation-token", token) if token else ("start-after", start_after))
        what = f"LIST {prefix}"
        return parse_page(_text(await self._ask("GET", "", credentials, query=query, limit=MOST_BYTES), what), what)

    async def delete(self, keys: Sequence[str], credentials: Credentials) -> list[str]:
        """Delete a batch (up to 1,000) and return the keys that are still there."""
        body, headers = deletion(keys)
        what = f"DELETE {keys[0]} and {len(keys) - 1} others"
        answer = await self._ask("POST", "", credentials, query=[("delete", "")], headers=headers, body=body, limit=MOST_BYTES)
        return parse_deletion(_text(answer, what), what)

    async def date(self, credentials: Credentials) -> float:
        """The store's clock, in whole seconds: what a HEAD of the bucket says, whatever its status."""
        answer = await self._ask("HEAD", "", credentials)
        try:
            return _seconds(answer.headers["date"])
        except (KeyError, ValueError) as error:
            raise no_answer("HEAD", "an answer without a readable Date") from error

    async def _ask(
        self,
        method: str,
        key: str,
        credentials: Credentials,
        *,
        query: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        body: Buffer = b"",
        payload: str = "",
        into: memoryview | None = None,
        arrived: Arrived | None = None,
        limit: int = _ERROR_BYTES,
    ) -> Answer:
        path, encoded = f"{self._address.path}/{encode_path(key)}", encode_query(query)
        signed = sign(
            credentials,
            self._settings.region,
            method=method,
            host=self._address.authority,
            path=path,
            query=encoded,
            headers=headers or {},
            payload=payload or hashlib.sha256(body).hexdigest(),
            at=self._clock.now(),
        )
        return await self._sockets.send(
            Request(method, f"{path}?{encoded}" if encoded else path, signed, body),
            deadline_s=self._settings.deadline_s(len(body) + (0 if into is None else len(into))),
            into=into,
            arrived=arrived,
            limit=limit,
            abortable=method != "PUT",
        )


def _range(start: int, end: int, whole: int) -> str:
    return f"bytes {start}-{end - 1}/{whole}"


def _absent(answer: Answer, what: str) -> Absent:
    refusal = Refusal.parse(answer.status, answer.text)
    if refusal.key_absent:
        return ABSENT
    raise refusal.error(what)


def _text(answer: Answer, what: str) -> str:
    """The document of a 200."""
    if answer.status != 200:
        raise Refusal.parse(answer.status, answer.text).error(what)
    return answer.text


def _meta(key: str, answer: Answer) -> ObjectMeta:
    """From the headers of a 200 or 206."""
    try:
        whole = answer.headers["content-range"].rpartition("/")[2] if answer.status == 206 else len(answer.body)
        modified = _seconds(answer.headers["last-modified"])
        return ObjectMeta(key, int(whole), answer.headers["etag"], modified)
    except (KeyError, ValueError) as error:
        raise no_answer(f"GET {key}", f"an answer that lacks a header or has a strange one: {error}") from error


@lru_cache(maxsize=64)
def _seconds(date: str) -> float:
    """Since the epoch; objects of one upload share their dates."""
    return parsedate_to_datetime(date).timestamp()
