"""The sources of settings, merged: `kvtier.toml` is overridden by `KVTIER_<SECTION>_<FIELD>` variables, those by flags.

This module parses; reading files and the environment is done by the caller, who passes their content in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final, get_type_hints

import msgspec

from kvstore.config.addresses import parse_address, static_peers
from kvstore.config.quantities import convert, parse_bytes
from kvstore.config.sections import SECTIONS, NodeSettings, PeersSettings, PricesSettings, Settings, Tenant, TlsSettings
from kvstore.config.storage_url import StorageUrl
from kvstore.directory_url import DirectoryUrl
from kvstore.errors import Invalid
from kvstore.keys import check_id
from kvstore.toml_text import parse_toml

_CLOSE: Final = 0.85
_OF_SERVICE: Final = re.compile(r"KVTIER_\w+_(SERVICE_HOST|(SERVICE_)?PORT(_\w+)?)")
_LINKS: Final = "if Kubernetes made it of a Service's name: set enableServiceLinks: false in the pod"
_OTHERS: Final = frozenset({  # what else of ours is read from the environment
    "KVTIER_URL", "KVTIER_GATEWAY", "KVTIER_TOKEN", "KVTIER_TOKEN_FILE", "KVTIER_DIRECTORY_USER", "KVTIER_DIRECTORY_PASSWORD",
    "KVTIER_DIRECTORY_PASSWORD_FILE", "KVTIER_SESSION_HEADER", "KVTIER_CACHE",
})  # fmt: skip


class Loaded(msgspec.Struct, frozen=True):
    """Settings, and where they came from.

    Attributes:
        settings: The values.
        origin: Of every `section.field`: `default`, a file's name, a variable's name or `flag`.
        ignored: Sentences about variables that look like settings, and are none.
    """

    settings: Settings
    origin: dict[str, str]
    ignored: tuple[str, ...] = ()


def load(
    *, toml: str = "", toml_name: str = "kvtier.toml", env: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> Loaded:
    """Merge the sources, later ones winning.

    Args:
        toml: Text of the file.
        toml_name: How to call it in errors and provenance.
        env: The process environment; an unknown `KVTIER_<SECTION>_...` is refused, one that looks like a setting is told of
            (`Loaded.ignored`), other variables are ignored.
        flags: `section.field` to text.

    Raises:
        Invalid: An unknown section or field (the message names the known ones), or a value that does not fit.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    origin = {f"{name}.{field}": "default" for name, kind in SECTIONS.items() for field in kind.__struct_fields__}

    def put(section: str, field: str, value: object, source: str) -> None:
        kind = SECTIONS.get(section)
        if section == "tenants":
            raise Invalid(f"{source}: tenants belong in a configuration file, each as a table [tenants.<name>]")
        if kind is None:
            raise Invalid(f"{source}: unknown section [{section}]; known: {', '.join(SECTIONS)}")
        if field not in kind.__struct_fields__:
            remedy = _LINKS if _OF_SERVICE.fullmatch(source) else ""
            raise Invalid(f"{source}: unknown setting {section}.{field}; known: {', '.join(kind.__struct_fields__)}", remedy=remedy)
        values[section][field] = convert(get_type_hints(kind)[field], value, f"{section}.{field} ({source})")
        origin[f"{section}.{field}"] = source

    tenants = _from_toml(toml, toml_name, put)
    for variable, text in (env or {}).items():
        section, _, field = variable.removeprefix("KVTIER_").lower().partition("_")
        if variable.startswith("KVTIER_") and section in {*SECTIONS, "tenants"}:
            put(section, field, text, variable)
    for name, text in (flags or {}).items():
        section, _, field = name.partition(".")
        put(section, field, text, "flag")
    settings = msgspec.convert(
        {**{name: kind(**values[name]) for name, kind in SECTIONS.items()}, "tenants": tenants}, Settings, from_attributes=True
    )
    _check(settings)
    return Loaded(settings, origin, tuple(filter(None, map(_mistaken, env or {}))))


def _mistaken(variable: str) -> str:
    """What to say of a variable that is no setting, and was meant to be one; "" where it is, or was not."""
    section, _, field = variable.removeprefix("KVTIER_").lower().partition("_")
    if not variable.startswith("KVTIER_") or variable in _OTHERS or section in SECTIONS:
        return ""
    known = {f"KVTIER_{name}_{each}".upper(): each for name, kind in SECTIONS.items() for each in kind.__struct_fields__}
    meant = [name for name, each in known.items() if each in {field, section if not field else f"{section}_{field}"}]
    meant = meant or get_close_matches(variable, known, cutoff=_CLOSE)
    whose = " for a node; a gateway reads gateway.toml and flags, no variables" if section == "gateway" else ""
    return f"{variable} is no setting and is ignored; there is {', '.join(meant)}{whose}" if meant else ""


def _from_toml(text: str, name: str, put: Any) -> dict[str, Tenant]:
    document = parse_toml(text, name)
    tenants = document.pop("tenants", {})
    for section, fields in document.items():
        if not isinstance(fields, dict):
            raise Invalid(f"{name}: {section} stands outside a section; known sections: {', '.join(SECTIONS)}")
        for field, value in fields.items():
            put(section, field, value, name)
    for tenant, table in tenants.items() if isinstance(tenants, dict) else ():
        if isinstance(table, dict) and "max_bytes" in table:
            table["max_bytes"] = parse_bytes(table["max_bytes"], f"tenants.{tenant}.max_bytes ({name})")
    try:
        parsed = msgspec.convert(tenants, dict[str, Tenant])
    except msgspec.ValidationError as error:
        raise Invalid(f"{name}: [tenants] {error}") from None
    return {check_id(tenant, "tenant"): table for tenant, table in parsed.items()}


def _check(settings: Settings) -> None:
    if settings.store.url:
        StorageUrl.parse(settings.store.url)
    if settings.dram.size < 1 << 20:
        raise Invalid("dram.size must be at least 1MiB")
    if settings.nvme.path and settings.nvme.size < 1 << 20:
        raise Invalid("nvme.size must be at least 1MiB")
    if not 0 <= settings.lifecycle.history <= 64:
        raise Invalid("lifecycle.history must be 0 to 64")
    if settings.lifecycle.collect_rate < 0:
        raise Invalid("lifecycle.collect_rate must be at least 0")
    if not 0 <= settings.prestage.held <= 90:
        raise Invalid("prestage.held must be 0 to 90 percent")
    if min(settings.prestage.speculative, settings.prestage.waiting, settings.prestage.hints) < 0:
        raise Invalid("prestage.speculative, prestage.waiting and prestage.hints must be at least 0")
    if settings.node.listen:
        parse_address(settings.node.listen)
    _check_events(settings.node)
    check_tls(settings.tls)
    for name, tenant in settings.tenants.items():
        if tenant.max_sessions < 0 or not 0 <= tenant.requests < math.inf:  # NaN is neither, and would limit nothing
            raise Invalid(f"tenants.{name}: max_sessions and requests must be at least 0 (0: no limit)")
    _check_prices(settings.prices)
    _check_peers(settings.peers)


def _check_prices(prices: PricesSettings) -> None:
    for field in prices.__struct_fields__:
        value = getattr(prices, field)
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise Invalid(f"prices.{field} must be at least 0 (0: unknown)")
    prefill_of(prices)


def prefill_of(prices: PricesSettings) -> dict[str, float]:
    """Tokens a second by model, of `prices.models`. Raises `Invalid`."""
    found = {}
    for text in prices.models:
        model, equals, rate = text.rpartition("=")
        try:
            found[model] = float(rate)
        except ValueError:
            found[model] = 0.0
        if not (model and equals and 0 < found[model] < math.inf):
            raise Invalid(f"prices.models has {text!r}; write model=tokens-per-second, like meta-llama/Llama-3.1-8B=12000")
    return found


def check_tls(tls: TlsSettings) -> None:
    """Raises `Invalid` where a part of it is missing."""
    if bool(tls.cert) != bool(tls.key):
        raise Invalid("tls.cert and tls.key go together: set both, or neither")
    if tls.client_ca and not tls.cert:
        raise Invalid("tls.client_ca asks clients for certificates, which needs tls.cert and tls.key")


def _check_events(node: NodeSettings) -> None:
    for field, text in (("node.events", node.events), ("node.events_replay", node.events_replay)):
        if text and (not text.startswith("tcp://") or not parse_address(text.removeprefix("tcp://"), field)[1]):
            raise Invalid(f"{field} is {text!r}; write it like tcp://127.0.0.1:5557")
    if node.events_replay and not node.events:
        raise Invalid("node.events_replay sends again what node.events publishes, which is empty")


def _check_peers(peers: PeersSettings) -> None:
    if not peers.listen:
        if peers.directory or peers.static:
            raise Invalid("peers.listen is empty, and other nodes are named: say where this one serves them, like 127.0.0.1:7979")
        return
    for field, text in (("peers.listen", peers.listen), ("peers.advertise", peers.advertise or peers.listen)):
        if not parse_address(text, field)[1]:
            raise Invalid(f"{field} is {text!r}; other nodes need a fixed port")
    if bool(peers.directory) == bool(peers.static):
        raise Invalid("peers.listen makes this node part of a mesh: set exactly one of peers.directory and peers.static")
    if len({bool(each) for each in (peers.tls_cert, peers.tls_key, peers.tls_ca)}) > 1:
        raise Invalid("peers.tls_cert, peers.tls_key and peers.tls_ca go together: set all three, or none")
    if peers.directory:
        DirectoryUrl.parse(peers.directory)
    static_peers(peers.static)


def masked(loaded: Loaded) -> dict[str, tuple[str, str]]:
    """`section.field` to (value, origin), for people to read. No setting holds a secret: URLs with credentials are refused."""
    shown: dict[str, tuple[str, str]] = {}
    for name, source in loaded.origin.items():
        section, _, field = name.partition(".")
        shown[name] = (_written(getattr(getattr(loaded.settings, section), field)), source)
    return shown


def _written(value: object) -> str:
    """As a variable or `--set` would spell it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
