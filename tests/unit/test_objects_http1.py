"""HTTP/1.1 answers, well made and not."""

import itertools
import socket
import threading
from types import SimpleNamespace

import pytest

from kvstore.errors import Corrupt
from kvstore.objects import http1
from kvstore.objects.http1 import Broken, Connection, Landing, NoAnswer

OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Connection(ours), theirs


def answer(pair, said, method="GET", end=False, **landing):
    connection, theirs = pair
    theirs.sendall(said)
    if end:
        theirs.shutdown(socket.SHUT_WR)
    return connection.receive(method, Landing(**landing), "GET k")


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\nTrailer: t\r\n\r\n"


@pytest.mark.parametrize("into", [None, 10, 7])
@pytest.mark.parametrize(
    ("said", "end", "reusable"),
    [
        (OK + b"Content-Length: 7\r\n\r\nabcdefg", False, True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length:7\r\n\r\nabcdefg", False, True),
        (OK + b"Content-Length: 7\r\nConnection: Close\r\n\r\nabcdefg", False, False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 7\r\n\r\nabcdefg", False, False),
        (OK + b"Content-Length: 7\r\n\r\nabcdefgHTTP/1.1 200 OK", False, False),
        (CHUNKED, False, True),
        (OK + b"ETag: x\r\n\r\nabcdefg", True, False),
        (OK + b"X: " + b"y" * 9000 + b"\r\nContent-Length: 7\r\n\r\nabcdefg", False, True),
    ],
)
def test_bodies_come_whole_however_their_end_is_told(pair, said, end, reusable, into):
    told = []
    target = None if into is None else memoryview(bytearray(into))
    found = answer(pair, said, end=end, into=target, arrived=lambda *span: told.append(span))
    assert (found.status, bytes(found.body)) == (200, b"abcdefg")
    assert pair[0].reusable == reusable
    if target is not None:
        assert bytes(target[:7]) == b"abcdefg"
        assert (told[0][0], told[-1][1]) == (0, 7)
        assert [start for start, _ in told[1:]] == [end for _, end in told[:-1]]


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body_end_with_their_head(pair, status):
    assert answer(pair, b"HTTP/1.1 %d x\r\nETag: a\r\nContent-Length: 5\r\n\r\n" % status).headers["etag"] == "a"
    assert pair[0].reusable
    assert bytes(answer(pair, OK + b"Content-Length: 9\r\n\r\n", method="HEAD").body) == b""
    assert pair[0].reusable


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", NoAnswer),
        (b"HTTP/1.1 200", Broken),
        (b"SSH-2.0-x\r\n\r\n", Broken),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", Broken),
        (b"HTTP/1.1 2000 OK\r\n\r\n", Broken),
        (OK + b"no colon\r\n\r\n", Broken),
        (OK + b"A: b\r\n folded: c\r\n\r\n", Broken),
        (OK + b"Content-Length: 7\r\n\r\nabc", Broken),
        (OK + b"Content-Length: -7\r\n\r\nabc", Broken),
        (OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", Broken),
        (OK + b"X: " + b"y" * (1 << 17), Broken),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", Broken),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n-3\r\nabc", Corrupt),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\nabcdefgh\r\n", Broken),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n8\r\nabc", Broken),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 9000, Broken),
        (OK + b"Content-Length: 11\r\n\r\n", Corrupt),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nb\r\n", Corrupt),
        (OK + b"\r\n" + b"x" * 11, Corrupt),
    ],
)
@pytest.mark.parametrize("into", [None, 10])
def test_what_is_no_answer_is_never_taken_for_one(pair, said, error, into):
    with pytest.raises(error):
        answer(pair, said, end=True, into=None if into is None else memoryview(bytearray(into)), limit=10)
    assert not pair[0].reusable


@pytest.mark.parametrize(("seconds", "spans"), [(1.0, [1, 2, 3, 4, 5]), (0.0, [1, 3, 5])], ids=["slow", "fast"])
def test_a_large_body_is_told_of_while_it_comes(pair, monkeypatch, seconds, spans):
    """By the MiB, or by two where a read takes no time; the second body of a connection from its start."""
    clock = itertools.count(0, seconds)
    monkeypatch.setattr(http1, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    body, told, target = bytes(range(256)) * (19 << 10), [], memoryview(bytearray(5 << 20))
    connection, theirs = pair
    for _ in range(2):
        told.clear()
        target[:] = bytes(len(target))
        sender = threading.Thread(target=theirs.sendall, args=(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body,))
        sender.start()
        found = connection.receive("GET", Landing(target, arrived=lambda *span: told.append(span)), "GET k")
        sender.join()
        assert found.body == body
        assert [round(end / (1 << 20)) for _, end in told] == spans
        assert [start for start, _ in told] == [0, *(end for _, end in told[:-1])]
        spans = [2, 5] if seconds == 0 else spans
