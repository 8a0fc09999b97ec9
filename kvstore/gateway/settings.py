"""What a gateway is told: `gateway.toml`, and flags over it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvstore.config import AuthSettings, TlsSettings, check_tls, parse_address
from kvstore.directory_url import DirectoryUrl
from kvstore.errors import Invalid
from kvstore.gateway.engines import EngineSettings
from kvstore.gateway.proxy import Bounds
from kvstore.server.auth import check_exposed
from kvstore.toml_text import parse_toml


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file.

    Attributes:
        engines: `[engines.<name>]`.
        listen: Its own address.
        auth: `[auth]`: who may use it, as of a node.
        tls: `[tls]`: its certificates, as of a node.
        model: Of the engines, as their KV's namespace has it; "" where no node is asked.
        tokenizer: Folder or id of the model's tokenizer; "" asks the engines.
        directory: Of the mesh that the nodes beside the engines are part of (`valkey://...`); "" where only these are asked.
        mesh: Its name there.
        header: A further header that may hold a session's id.
        requests: At a time; more are refused.
        bounds: `[bounds]`: of each.
    """

    engines: dict[str, EngineSettings] = {}
    listen: str = "127.0.0.1:7900"
    auth: AuthSettings = AuthSettings()
    tls: TlsSettings = TlsSettings()
    model: str = ""
    tokenizer: str = ""
    directory: str = ""
    mesh: str = "default"
    header: str = ""
    requests: Annotated[int, msgspec.Meta(ge=1)] = 1024
    bounds: Bounds = Bounds()


def load(text: str, name: str = "gateway.toml", *, engines: Sequence[str] = (), **flags: object) -> GatewaySettings:
    """Settings from a file's text and flags.

    Args:
        text: Of the file.
        name: Of the file, for errors.
        engines: `name=url`, with `,node=...`, `,events=...` and the other settings of an engine behind it; over the file's.
        flags: Other settings; None and "" mean that they were not given.

    Raises:
        Invalid: The file is not TOML, or something in it or in the flags does not fit.
    """
    found = parse_toml(text, name)
    found |= {key: value for key, value in flags.items() if value not in {None, ""}}
    table = found.get("engines", {})
    if isinstance(table, dict):
        of_file = {key: _settings(f"{name}: engines.{key}", each) for key, each in table.items()}
        found["engines"] = of_file | dict(map(_engine, engines))
    try:
        settings = msgspec.convert(found, GatewaySettings)
    except msgspec.ValidationError as error:
        raise Invalid(f"{name}: {error}") from None
    host, port = parse_address(settings.listen, "listen")
    if settings.directory:
        DirectoryUrl.parse(settings.directory)
    check_tls(settings.tls)
    check_exposed(host, port, settings.auth, settings.tls, field="listen")
    return settings


def _engine(text: str) -> tuple[str, EngineSettings]:
    name, equals, rest = text.partition("=")
    url, *more = rest.split(",")
    pairs = [each.partition("=") for each in more]
    if not name or not equals or not url or not all(each[1] for each in pairs):
        raise Invalid(f"--engine is {text!r}; write it like a=http://127.0.0.1:8000,node=kvtier://127.0.0.1:7878")
    settings: dict[str, object] = {
        "url": url,
        **{key: int(value) if re.fullmatch("[0-9]{1,9}", value) else value for key, _, value in pairs},
    }
    return name, _settings(f"--engine {name}", settings)


def _settings(where: str, found: object) -> EngineSettings:
    """Of one engine: msgspec says of a table's entries no more than `[...]`."""
    known = EngineSettings.__struct_fields__
    if isinstance(found, dict) and (unknown := sorted(found.keys() - set(known))):
        raise Invalid(f"{where}: unknown part {unknown[0]}; known: {', '.join(known)}")
    try:
        return msgspec.convert(found, EngineSettings)
    except msgspec.ValidationError as error:
        raise Invalid(f"{where}: {error}") from None
