"""What object stores answer, and what clients ask a gateway for."""

import contextlib
import json

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

from kvstore.connectors.session_names import SESSION, fields_of, session_of, with_xargs
from kvstore.errors import Corrupt, Invalid, KVTierError
from kvstore.gateway.asked import CHAT, COMPLETIONS, PROMPT, asked
from kvstore.gateway.routes import RouteAsked
from kvstore.gateway.tenancy import of_tenant
from kvstore.objects.answers import Refusal
from kvstore.objects.documents import parse_deletion, parse_page
from kvstore.objects.http1 import Broken, Connection, Landing
from parsers.target import Target, same


class _Sock:
    """A socket from which these bytes come, in pieces of at most `piece`."""

    def __init__(self, data, piece):
        self._data, self._piece = memoryview(data), piece

    def recv_into(self, target, _nbytes=0, flags=0):
        got = min(len(target), len(self._data), len(self._data) if flags else self._piece)
        target[:got], self._data = self._data[:got], self._data[got:]
        return got

    def recv(self, nbytes):
        got = bytes(self._data[: min(nbytes, self._piece)])
        self._data = self._data[len(got) :]
        return got


def http_answer(data):
    """However it comes in, the same is understood."""
    found = []
    for into in (None, 64):
        for piece in (1 << 16, 7, 1):
            connection = Connection(_Sock(data, piece))
            try:
                answer = connection.receive("GET", Landing(memoryview(bytearray(into)) if into else None, 1 << 12), "GET k")
                found.append((into, answer.status, answer.headers, bytes(answer.body)))
                assert len(answer.body) <= (into or 1 << 12) or answer.status not in {200, 206}
            except (Broken, Corrupt) as error:
                found.append((into, type(error)))
    for at in (0, 3):
        assert found[at] == found[at + 1] == found[at + 2], found


def store_documents(data):
    text = data.decode("utf-8", "replace")
    for read in (
        parse_page,
        parse_deletion,
        lambda body, what: [Refusal.parse(status, body).error(what) for status in (0, 200, 301, 404, 409, 503)],
    ):
        with contextlib.suppress(KVTierError):
            read(text, "LIST k")


def gateway_request(data):
    """Headers, one a line, an empty line, the body."""
    head, _, body = data.partition(b"\n\n")
    pairs = [line.partition(b":")[::2] for line in head.split(b"\n")]
    headers = CIMultiDictProxy(
        CIMultiDict([(name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in pairs])
    )
    for path in (CHAT, COMPLETIONS):
        try:
            wanted = asked(path, body, headers, header="x-mine")
            theirs = of_tenant(wanted, "tenant/a", header="x-mine")
        except Invalid:
            continue
        for name in PROMPT:
            with contextlib.suppress(msgspec.MsgspecError):
                wanted.field(name)
        _bound(theirs)
    with contextlib.suppress(msgspec.MsgspecError):
        msgspec.json.decode(body, type=RouteAsked)


def _bound(theirs):
    """An engine sees the salt and the session of the tenant, and no other."""
    try:
        said = json.loads(theirs.body)
    except (ValueError, RecursionError):  # an engine refuses it as well
        return
    same(said["cache_salt"], theirs.salt)
    own = {
        name: said[name] for name in SESSION if name in said
    }  # beside the fields below, an engine reads them as they are spelled
    for place in (own, said.get("vllm_xargs"), said.get("kv_transfer_params")):
        session = session_of(place)
        assert not session or session == theirs.session or session.startswith("tenant%2Fa/"), session


def session_fields(data):
    fields = fields_of(data)
    if fields is None:
        return
    session_of(fields)
    written = with_xargs(data, fields, {"session_id": "mine"})
    if written is not None:
        again = fields_of(written)
        assert again is not None, written
        assert "session_id" in again["vllm_xargs"]


_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\nTrailer: t\r\n\r\n"
_PAGE = b"""<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><EncodingType>url</EncodingType><Contents><Key>a%2Fb</Key><Size>3</Size>
<ETag>"e"</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>
</ListBucketResult>"""
_JSON = (b"{", b"}", b"[", b"]", b'":', b",", b"null", b"true", b'"\\ud800"', b"\xef\xbb\xbf")
_ASKED = (
    b'{"model":"m","messages":[{"role":"user","content":"hi"}],"session_id":"s",'
    b'"vllm_xargs":{"session_id":"t"},"cache_salt":"x","stream":true}'
)
_IDS = (
    b"session_id",
    b"parent_session_id",
    b"x-session-id",
    b"cache_salt",
    b"vllm_xargs",
    b"kv_transfer_params",
    b"prompt",
    b"messages",
    b"tools",
)
TARGETS = (
    Target(
        "http_answer",
        http_answer,
        (
            _OK + b"Content-Length: 7\r\n\r\nabcdefg",
            b"HTTP/1.1 100 Continue\r\n\r\n" + _OK + b"content-length:7\r\nETag: x\r\n\r\nabcdefg",
            b"HTTP/1.0 404 Not Found\r\nConnection: close\r\n\r\n<Error/>",
            _CHUNKED,
            b"HTTP/1.1 204 x\r\n\r\n",
        ),
        (
            b"\r\n",
            b"\r\n\r\n",
            b"HTTP/1.1 ",
            b"Content-Length: ",
            b"Transfer-Encoding: chunked",
            b"Connection: close",
            b"0\r\n\r\n",
            b"206",
            b"ffffffffffffffff",
        ),
    ),
    Target(
        "store_documents",
        store_documents,
        (
            _PAGE,
            b"<Error><Code>SlowDown</Code><Message>m</Message></Error>",
            b"<DeleteResult><Error><Key>k</Key><Code>InternalError</Code></Error></DeleteResult>",
        ),
        (
            b"<Contents>",
            b"</Contents>",
            b"<Key>",
            b"<Size>",
            b"<ETag>",
            b"<LastModified>",
            b"<IsTruncated>",
            b"<Code>",
            b"&amp;",
            b"<!DOCTYPE",
            b"xmlns=",
        ),
    ),
    Target(
        "gateway_request",
        gateway_request,
        (
            b"X-Session-ID: a\nConnection: x, y\nX-Mine: z\n\n" + _ASKED,
            b'Authorization: Bearer t\n\n{"prompt":[1,2,3],"kv_transfer_params":{"X-Session-ID":"q","parent_session_id":"p"}}',
            b"\n\n" + b'{"token_ids":[1,2],"salt":"s","prefix_ids":["a"],"tokens":3}',
        ),
        (*_JSON, *_IDS, b"\n\n", b"X-Session-ID: "),
    ),
    Target("session_fields", session_fields, (_ASKED, b" {} ", b'{"vllm_xargs": {"session_id": "x"}}\n'), (*_JSON, *_IDS)),
)
