"""The XML of S3's listings and batch deletions. A document of another kind is never taken for an empty one.

That matters: an error document inside a 200, read as a listing of nothing, would make a collector believe that nothing is in use.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Final
from urllib.parse import unquote_plus
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

import msgspec

from kvstore.objects.answers import Refusal, no_answer
from kvstore.objects.base import ObjectMeta

MOST_BYTES: Final = 8 << 20
"""Of one document: a page of 1,000 keys of 1,024 bytes, each of which may be escaped threefold."""


class Page(msgspec.Struct, frozen=True):
    """A page of a listing; `token` continues it, and is empty on the last."""

    objects: tuple[ObjectMeta, ...]
    token: str


def parse_page(body: str, what: str) -> Page:
    """Of a ListObjectsV2 answer.

    Raises:
        KVTierError: What an error document says; `Unavailable` for a broken or foreign one.
    """
    root = _root(body, "ListBucketResult", what)
    encoded = root.findtext("EncodingType") == "url"
    try:
        objects = tuple(
            ObjectMeta(
                unquote_plus(_text(entry, "Key")) if encoded else _text(entry, "Key"),
                int(_text(entry, "Size")),
                _text(entry, "ETag"),
                datetime.fromisoformat(_text(entry, "LastModified")).timestamp(),
            )
            for entry in root.iterfind("Contents")
        )
    except ValueError as error:
        raise no_answer(what, f"a listing that makes no sense: {error}") from error
    truncated = root.findtext("IsTruncated") == "true"
    token = root.findtext("NextContinuationToken") or ""
    if truncated and not token:
        raise no_answer(what, "a listing that is cut short and does not say how it goes on")
    return Page(objects, token if truncated else "")


def deletion(keys: Sequence[str]) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a DeleteObjects request that answers with errors only."""
    entries = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
    body = f'<?xml version="1.0" encoding="UTF-8"?><Delete><Quiet>true</Quiet>{entries}</Delete>'.encode()
    digest = hashlib.md5(body, usedforsecurity=False).digest()  # S3 asks for it by name
    return body, {"content-md5": base64.b64encode(digest).decode(), "content-type": "application/xml"}


def parse_deletion(body: str, what: str) -> list[str]:
    """Keys that a DeleteObjects answer says are still there.

    Raises:
        KVTierError: As `parse_page`.
    """
    root = _root(body, "DeleteResult", what)
    refused = [error for error in root.iterfind("Error") if error.findtext("Code") not in {"NoSuchKey", "NoSuchVersion"}]
    try:
        return [_text(error, "Key") for error in refused]
    except ValueError as error:
        raise no_answer(what, f"a list of what was not deleted that makes no sense: {error}") from error


def _root(body: str, expected: str, what: str) -> ET.Element:
    if "<!DOCTYPE" in body or "<!ENTITY" in body:
        raise no_answer(what, "a document with entities, which no store sends")
    try:
        root = ET.fromstring(body)  # noqa: S314  entities were refused above, and the size is bounded
    except ET.ParseError as error:
        raise no_answer(what, f"a broken document: {error}") from error
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    if root.tag == "Error":
        raise Refusal.parse(200, body).error(what)
    if root.tag != expected:
        raise no_answer(what, f"a {root.tag[:40]} document where {expected} was expected")
    return root


def _text(element: ET.Element, name: str) -> str:
    text = element.findtext(name)
    if text is None:
        raise ValueError(f"no {name}")
    return text
