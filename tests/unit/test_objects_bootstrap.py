"""What `kvtier bootstrap` asks of MinIO, which is not to be had here: a stand-in that speaks its API for administrators."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("minio", reason="the extra `bootstrap` is not installed")

from minio.crypto import decrypt, encrypt
from urllib3 import HTTPResponse

from kvstore.errors import Denied
from kvstore.objects import S3Settings
from kvstore.objects.bootstrap import bootstrap, policy
from kvstore.objects.credentials import Credentials

OWNER, NODE = Credentials("owner", "owner-secret"), Credentials("kvtier-node", "node-secret")
ERROR = "<Error><Code>{}</Code><Message>said</Message></Error>"


class FakeMinio:
    """Remembers what it was told: `buckets`, `users`, `policies`, `attached`."""

    def __init__(self):
        self.buckets, self.users, self.policies, self.attached, self.asked = set(), {}, {}, set(), []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def serve(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = fake.answer(self.command, urlsplit(self.path), body, self.headers["Authorization"])
                self.send_response(status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_PUT = do_POST = do_HEAD = serve  # noqa: N815  names of http.server

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method, url, body, signature):
        key = re.search(r"Credential=([^/]+)/", signature)[1]
        self.asked.append(f"{method} {url.path}")
        if url.path.startswith("/minio/admin/v3/"):
            if key != OWNER.access_key:
                return 403, ERROR.format("AccessDenied").encode()
            return self._admin(url.path.removeprefix("/minio/admin/v3/"), parse_qs(url.query), body)
        if key not in {OWNER.access_key, *self.users}:
            return 403, ERROR.format("InvalidAccessKeyId").encode()
        return self._s3(method, url)

    def _s3(self, method, url):
        bucket = url.path.split("/")[1]
        if "lifecycle" in url.query:
            return (404, ERROR.format("NoSuchLifecycleConfiguration").encode()) if method == "GET" else (
                400, ERROR.format("MalformedXML").encode(),
            )  # fmt: skip
        if method == "PUT":
            self.buckets.add(bucket)
            return 200, b""
        if bucket not in self.buckets:
            return 404, ERROR.format("NoSuchBucket").encode()
        return 200, b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name></ListBucketResult>'

    def _admin(self, what, query, body):
        def plain():
            return json.loads(decrypt(HTTPResponse(BytesIO(body), preload_content=False), OWNER.secret_key))

        match what:
            case "info":
                return 200, b'{"mode": "online"}'
            case "add-canned-policy":
                self.policies[query["name"][0]] = json.loads(body)
            case "add-user":
                self.users[query["accessKey"][0]] = plain()["secretKey"]
            case "idp/builtin/policy/attach":
                asked = plain()
                pair = (asked["user"], *asked["policies"])
                if pair in self.attached:
                    return 400, b'{"Code":"XMinioAdminPolicyChangeAlreadyApplied","Message":"there is nothing to do"}'
                self.attached.add(pair)
                return 200, encrypt(b"{}", OWNER.secret_key)
            case _:
                return 404, b"{}"
        return 200, b""


@pytest.fixture
def minio():
    fake = FakeMinio()
    yield fake
    fake.close()


def run(minio, user=NODE):
    return [(step.what, step.outcome) for step in bootstrap(S3Settings(bucket="kvt", endpoint=minio.endpoint), "root", OWNER, user)]


def test_a_new_store_gets_bucket_policy_and_user_and_says_that_it_takes_no_rule(minio):
    assert run(minio) == [("bucket", "made"), ("uploads", "unsupported"), ("policy", "set"), ("user", "set"), ("access", "there")]
    assert minio.buckets == {"kvt"}
    assert minio.users == {NODE.access_key: NODE.secret_key}
    assert minio.attached == {(NODE.access_key, "kvtier-kvt")}
    assert minio.policies["kvtier-kvt"] == policy("kvt", "root")


def test_again_changes_nothing(minio):
    run(minio)
    before = SimpleNamespace(users=dict(minio.users), attached=set(minio.attached))
    assert run(minio)[0] == ("bucket", "there")
    assert (minio.users, minio.attached) == (before.users, before.attached)


def test_without_a_user_no_administrator_is_needed(minio):
    assert run(minio, None) == [("bucket", "made"), ("uploads", "unsupported")]
    assert not [line for line in minio.asked if "/minio/" in line]


def test_nothing_is_written_to_a_store_that_has_no_such_api(minio):
    minio._admin = lambda *_: (404, ERROR.format("NoSuchBucket").encode())
    with pytest.raises(Denied, match="kvtier-node in bucket kvt: the store answered 403 InvalidAccessKeyId") as refused:
        run(minio)
    assert "give the store's configuration a user with this key" in refused.value.remedy
    assert [line for line in minio.asked if "/minio/" in line] == ["GET /minio/admin/v3/info"]


def test_an_owner_that_is_none_is_told_so_without_a_secret(minio):
    stranger = Credentials("stranger", "stranger-secret")
    with pytest.raises(Denied, match="403") as refused:
        list(bootstrap(S3Settings(bucket="kvt", endpoint=minio.endpoint), "", stranger, None))
    assert "secret" not in str(refused.value)


def test_the_policy_lets_nodes_touch_their_prefix_and_list_the_bucket_and_no_more():
    listing, touching = policy("kvt", "root")["Statement"]
    assert listing["Resource"] == ["arn:aws:s3:::kvt"]
    assert touching["Resource"] == ["arn:aws:s3:::kvt/root/*"]
    assert policy("kvt", "")["Statement"][1]["Resource"] == ["arn:aws:s3:::kvt/*"]
    assert not [action for each in (listing, touching) for action in each["Action"] if "*" in action or "Policy" in action]
