"""An S3 server in this process whose misbehaviour is scripted and whose every request is written down.

It keeps objects in memory with real conditional semantics, under any bucket in `buckets`. Signatures are not checked, only which
access key a request names.
"""

import hashlib
import re
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, quote_plus, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

STATUS = {
    "SlowDown": 503,
    "ExpiredToken": 400,
    "NoSuchKey": 404,
    "NoSuchBucket": 404,
    "InvalidRange": 416,
    "PreconditionFailed": 412,
}


@dataclass
class Seen:
    """One request, as it arrived."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    size: int
    digest: str
    body: bytes = field(repr=False, default=b"")

    @property
    def verb(self) -> str:
        if self.method == "GET" and "list-type" in self.query:
            return "LIST"
        if self.method == "PUT" and "x-amz-copy-source" in self.headers:
            return "COPY"
        return self.method


@dataclass
class Act:
    """What to do instead of, or besides, the right thing. See `FakeS3.on`."""

    verb: str
    key: str
    times: int
    status: int
    code: str
    drop: Literal["", "before", "after"]
    delay: float
    truncate: int | None
    headers: dict[str, str]
    body: bytes | None
    until: threading.Event | None


class FakeS3:
    """Serves on a free port of loopback from `start` to `stop`."""

    def __init__(self, buckets: tuple[str, ...] = ("bucket",)) -> None:
        self.buckets = set(buckets)
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.keys: dict[str, str] = {}  # access key -> error code it is answered with; empty: every key is fine
        self.undeletable: set[str] = set()
        self.skew = 0.0
        self.seen: list[Seen] = []
        self.connections = 0
        self._acts: list[Act] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.port = self._server.server_address[1]
        self.scheme = "http"

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://localhost:{self.port}" if self.scheme == "https" else f"http://127.0.0.1:{self.port}"

    def start(self, tls: ssl.SSLContext | None = None) -> None:
        if tls:
            self.scheme = "https"
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        for act in self._acts:
            if act.until:
                act.until.set()
        self._server.shutdown()
        self._server.server_close()

    def on(
        self,
        verb: str = "*",
        key: str = "*",
        *,
        times: int = 1,
        status: int = 0,
        code: str = "",
        drop: Literal["", "before", "after"] = "",
        delay: float = 0.0,
        truncate: int | None = None,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
        until: threading.Event | None = None,
    ) -> None:
        """Script the next `times` requests of a verb (GET HEAD PUT COPY LIST POST) for keys of a pattern.

        `status` and `code`: answer an S3 error document; `status=200` hides it in a success. `drop`: close the connection before or
        after the request took effect. `delay`, `until`: wait first. `truncate`: promise the body and end after so many bytes.
        `headers`, `body`: add to or replace the right answer's.
        """
        self._acts.append(Act(verb, key, times, status, code, drop, delay, truncate, headers or {}, body, until))

    def count(self, verb: str) -> int:
        return sum(1 for request in self.seen if request.verb == verb)

    def _act(self, seen: Seen) -> Act | None:
        with self._lock:
            self.seen.append(seen)
            for act in self._acts:
                if act.times and act.verb in {"*", seen.verb} and fnmatchcase(seen.key, act.key):
                    act.times -= 1
                    return act
        return None

    def _refused(self, seen: Seen, bucket: str) -> str:
        found = re.search(r"Credential=([^/]+)/", seen.headers.get("authorization", ""))
        if self.keys and (code := self.keys.get(found[1] if found else "", "InvalidAccessKeyId")):
            return code
        return "" if bucket in self.buckets else "NoSuchBucket"

    def _do(self, seen: Seen) -> tuple[int, dict[str, str], bytes]:
        """The right answer."""
        with self._lock:
            match seen.verb:
                case "LIST":
                    return self._list(seen.query)
                case "POST":
                    return self._delete(seen.body)
                case "HEAD" if not seen.key:
                    return 200, {}, b""
                case "GET" | "HEAD":
                    return self._get(seen)
                case "PUT":
                    return self._put(seen)
                case "COPY":
                    source = unquote(seen.headers["x-amz-copy-source"]).lstrip("/").partition("/")[2]
                    if source not in self.objects:
                        return error("NoSuchKey")
                    self.objects[seen.key] = (self.objects[source][0], time.time())  # noqa: TID251  a server of its own
                    tag = escape(etag(self.objects[source][0]))
                    return 200, {}, f"<CopyObjectResult><ETag>{tag}</ETag></CopyObjectResult>".encode()
                case "DELETE":
                    self.objects.pop(seen.key, None)
                    return 204, {}, b""
        return error("MethodNotAllowed", 405)

    def _get(self, seen: Seen) -> tuple[int, dict[str, str], bytes]:
        if seen.key not in self.objects:
            return error("NoSuchKey")
        body, at = self.objects[seen.key]
        headers = {"ETag": etag(body), "Last-Modified": formatdate(at, usegmt=True)}
        if seen.headers.get("if-none-match") == etag(body):
            return 304, headers, b""
        if span := re.fullmatch(r"bytes=(\d+)-(\d+)", seen.headers.get("range", "")):
            start, end = int(span[1]), min(int(span[2]) + 1, len(body))
            if start >= len(body):
                return error("InvalidRange")
            return 206, {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(body)}"}, body[start:end]
        return 200, headers, body

    def _put(self, seen: Seen) -> tuple[int, dict[str, str], bytes]:
        there = self.objects.get(seen.key)
        if seen.headers.get("if-none-match") == "*" and there:
            return error("PreconditionFailed")
        if "if-match" in seen.headers:
            if there is None:
                return error("NoSuchKey")  # as AWS does
            if seen.headers["if-match"] != etag(there[0]):
                return error("PreconditionFailed")
        self.objects[seen.key] = (seen.body, time.time())  # noqa: TID251  a server of its own
        return 200, {"ETag": etag(seen.body)}, b""

    def _list(self, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        after = query.get("continuation-token") or query.get("start-after", "")
        keys = sorted(k for k in self.objects if k.startswith(query.get("prefix", "")) and k > after)
        most = int(query.get("max-keys", "1000"))
        entries = "".join(
            f"<Contents><Key>{quote_plus(k, safe='/')}</Key><Size>{len(self.objects[k][0])}</Size>"
            f"<ETag>{escape(etag(self.objects[k][0]))}</ETag><LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>"
            for k in keys[:most]
        )
        more = f"<NextContinuationToken>{escape(keys[most - 1])}</NextContinuationToken>" if len(keys) > most else ""
        body = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><EncodingType>url</EncodingType>'
            f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{more}{entries}</ListBucketResult>"
        )
        return 200, {"Content-Type": "application/xml"}, body.encode()

    def _delete(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        errors = ""
        for key in map(unescape, re.findall(r"<Key>([^<]*)</Key>", body.decode())):
            if key in self.undeletable:
                errors += f"<Error><Key>{escape(key)}</Key><Code>InternalError</Code><Message>no</Message></Error>"
            else:
                self.objects.pop(key, None)
        return 200, {"Content-Type": "application/xml"}, f"<DeleteResult>{errors}</DeleteResult>".encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the script."""


def etag(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


def error(code: str, status: int = 0) -> tuple[int, dict[str, str], bytes]:
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>scripted</Message></Error>'
    return status or STATUS.get(code, 403), {"Content-Type": "application/xml"}, text.encode()


def _handler(fake: FakeS3) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            fake.connections += 1

        def log_message(self, *args: Any) -> None:
            pass

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            url = urlsplit(self.path)
            bucket, _, key = unquote(url.path).lstrip("/").partition("/")
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
            headers = {name.lower(): value for name, value in self.headers.items()}
            seen = Seen(self.command, key, query, headers, len(body), hashlib.sha256(body).hexdigest(), body)
            act = fake._act(seen)
            if act and act.until:
                act.until.wait(60)
            if act and act.delay:
                time.sleep(act.delay)
            if act and act.drop == "before":
                self.close_connection = True
                return
            refused = fake._refused(seen, bucket)
            if act and act.status:
                answer = error(act.code, act.status)
            elif refused:
                answer = error(refused)
            else:
                answer = fake._do(seen)
            if act and act.drop == "after":
                self.close_connection = True
                return
            self._reply(*answer, act)

        def _reply(self, status: int, headers: dict[str, str], body: bytes, act: Act | None) -> None:
            if act:
                headers = {**headers, **act.headers}
                body = body if act.body is None else act.body
            self.send_response_only(status)
            self.send_header("Date", formatdate(time.time() + fake.skew, usegmt=True))  # noqa: TID251  a server of its own
            for name, value in headers.items():
                self.send_header(name, value)
            if "Transfer-Encoding" not in headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD" or status in {204, 304}:
                return
            if act and act.truncate is not None:
                body = body[: act.truncate]
                self.close_connection = True
            if "Transfer-Encoding" in headers:
                body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
            self.wfile.write(body)

    return Handler
