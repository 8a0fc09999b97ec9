"""The console's files as a browser gets them: who may load what, what is asked for again, and that all of them are there."""

import re
from importlib.resources import files

import aiohttp
import pytest
from fakes.node import fake_service

from kvstore.access import Tokens
from kvstore.config import AuthSettings
from kvstore.server.app import HttpServer

PAGE = files("kvstore.server.console") / "page"
NAMES = sorted(each.name for each in PAGE.iterdir())
POLICY = {
    "default-src": ["'none'"],
    "script-src": ["'self'"],
    "style-src": ["'self'"],
    "connect-src": ["'self'"],
    "img-src": ["'self'", "data:"],
    "base-uri": ["'none'"],
    "form-action": ["'none'"],
    "frame-ancestors": ["'none'"],
}


@pytest.fixture
async def http():
    async with (
        fake_service() as service,
        HttpServer.open(service, "127.0.0.1:0") as server,
        aiohttp.ClientSession(server.url) as session,
    ):
        yield session


@pytest.mark.parametrize("path", ["/", *(f"/console/{name}" for name in NAMES if name != "index.html")])
async def test_a_file_comes_from_here_and_loads_only_what_comes_from_here(http, path):
    async with http.get(path) as answer:
        body, etag = await answer.read(), answer.headers["ETag"]
        said = [each.split() for each in answer.headers["Content-Security-Policy"].split(";")]
        assert {name: values for name, *values in said} == POLICY
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cache-Control"] == "no-cache"
        kind = {"": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}[
            path.rpartition(".")[2].strip("/")
        ]
        assert answer.content_type == kind
    assert body
    for known, status in ((etag, 304), (f'"other", W/{etag}', 304), ('"other"', 200)):
        async with http.get(path, headers={"If-None-Match": known}) as answer:
            assert (answer.status, answer.headers["ETag"]) == (status, etag)
            assert await answer.read() == (b"" if status == 304 else body)


async def test_nothing_else_is_served(http):
    for path in (
        "/console/",
        "/console/index.html",
        "/console/__init__.py",
        "/console/../app.py",
        "/console/app.js/",
        "/favicon.ico",
    ):
        async with http.get(path) as answer:
            assert answer.status == 404, path


async def test_the_files_need_no_token_and_what_they_ask_for_does(tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(Tokens({}).text())
    async with (
        fake_service() as service,
        HttpServer.open(service, "127.0.0.1:0", auth=AuthSettings(tokens_file=str(path))) as server,
        aiohttp.ClientSession(server.url) as session,
    ):
        for at, status in (("/", 200), ("/console/app.js", 200), ("/console/console.css", 200), ("/v1/stats", 401)):
            async with session.get(at) as answer:
                assert answer.status == status, at


def test_what_a_file_names_is_there_and_nothing_is_written_into_the_page():
    for name in NAMES:
        text = (PAGE / name).read_text()
        for imported in re.findall(r'from "\./([^"]+)"', text):
            assert imported in NAMES, (name, imported)
        for linked in re.findall(r'(?:src|href)="(/[^"]*)"', text):
            assert linked.removeprefix("/console/") in NAMES, (name, linked)
        assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", text), name
        assert set(re.findall(r"""https?:[^"' )]+""", text)) <= {"http://www.w3.org/2000/svg"}, name
    index = (PAGE / "index.html").read_text()
    assert not re.search(r"<script(?![^>]* src=)|<style| style=| on\w+=", index)
