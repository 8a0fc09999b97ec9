"""The console: one page at `/` that shows what a node, or a gateway, does. Files without a build step, served as they are.

Nobody needs a token for them: they hold no data. What the page shows it asks for by the HTTP API, with the token of whoever looks.
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final, Literal

from aiohttp import web
from blake3 import blake3

from kvstore.server.auth import needs
from kvstore.server.problems import Handler

Face = Literal["node", "gateway"]
FOLDER: Final = "/console"
_PAGE: Final = "index.html"
_FACE: Final = b'data-face="node"'  # in the page: which of the two it is to show
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Everything comes from here, and nothing that a session is called can become a script, a style or a request elsewhere.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, and asked for again by its ETag: another version is seen at the next load
}


def console_routes(face: Face) -> list[web.RouteDef]:
    """The page at `/`, and a route for each of its files. They are read once, now."""
    page = files(__package__).joinpath("page")
    names = sorted(each.name for each in page.iterdir() if each.name.rpartition(".")[2] in _TYPES and each.name != _PAGE)
    index = page.joinpath(_PAGE).read_bytes().replace(_FACE, b'data-face="%s"' % face.encode(), 1)
    return [
        web.get("/", _file(index, "html"), name="console"),
        *(web.get(f"{FOLDER}/{name}", _stored(page.joinpath(name))) for name in names),
    ]


def _stored(file: Traversable) -> Handler:
    return _file(file.read_bytes(), file.name.rpartition(".")[2])


def _file(body: bytes, ending: str) -> Handler:
    etag = f'"{blake3(body).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": etag}

    @needs("open")
    async def handle(request: web.Request) -> web.Response:
        known = request.headers.get("If-None-Match", "")
        if etag in (each.strip().removeprefix("W/") for each in known.split(",")):
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers={**headers, "Content-Type": _TYPES[ending]})

    return handle
