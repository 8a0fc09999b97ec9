"""What an operator writes: settings, variables, the gateway's file, access tokens, master keys."""

import contextlib
from datetime import UTC, datetime
from pathlib import Path

from kvstore.access import Tokens, bearer
from kvstore.config.loading import load, masked
from kvstore.config.sections import SECTIONS
from kvstore.errors import Denied, KVTierError
from kvstore.gateway import settings as gateway
from kvstore.sealing.keyfile import MasterKey, MasterKeys, spelled
from parsers.target import Target, same, text_of

_DEPLOY = Path(__file__).parents[3] / "deploy"
_APART = b"\n---\n"  # the file, then variables, one a line


def settings(data):
    file, _, rest = data.partition(_APART)
    env = dict(line.partition("=")[::2] for line in text_of(rest).split("\n"))
    try:
        loaded = load(toml=text_of(file), env=env)
    except KVTierError:
        return
    flags = {name: value for name, (value, _) in masked(loaded).items() if _sayable(loaded, name)}
    again = load(flags=flags)
    for name in flags:
        same(_value(loaded, name), _value(again, name))


def _value(loaded, name):
    section, _, field = name.partition(".")
    return getattr(getattr(loaded.settings, section), field)


def _sayable(loaded, name):
    """A list whose texts hold commas or spaces at their ends, or nothing, has no form as one text."""
    value = _value(loaded, name)
    return not isinstance(value, tuple) or all(each and each == each.strip() and "," not in each for each in value)


def gateway_settings(data):
    file, _, rest = data.partition(_APART)
    with contextlib.suppress(KVTierError):
        gateway.load(text_of(file), engines=[line for line in text_of(rest).split("\n") if line])


def tokens(data):
    text = text_of(data)
    with contextlib.suppress(Denied):
        same("", bearer(text)) if not text else bearer(text)
    try:
        known = Tokens.parse(text)
    except KVTierError:
        return
    again = Tokens.parse(known.text())
    same(known.known.keys(), again.known.keys())
    for name, token in known.known.items():
        other = again.known[name]
        same((token.hash, token.tenant, token.scopes), (other.hash, other.tenant, other.scopes))
        same(*(each.expires and each.expires.astimezone(UTC).replace(microsecond=0) for each in (token, other)))
    for said in (text, "kvt_0a1b2c3d4e5f6071_" + "0" * 64):
        with contextlib.suppress(Denied):
            known.of(said, datetime(2027, 1, 1, tzinfo=UTC).timestamp())


def key_file(data):
    try:
        keys = MasterKeys.parse(data, "file")
    except KVTierError:
        return
    wrapped = keys.wrap(b"secret", "keys/a")
    same(keys.unwrap(wrapped, "keys/a"), b"secret")


_TOKENS = b"""[tokens.0a1b2c3d4e5f6071]
hash = "sha256:%s"
tenant = "research"
scopes = ["read", "write"]
expires = 2027-01-31T00:00:00Z
""" % (b"0" * 64)
_TOML = (
    b"[",
    b"]",
    b"[[",
    b"]]",
    b"=",
    b'"',
    b"'",
    b'"""',
    b"{",
    b"}",
    b"0x",
    b"1e9",
    b"inf",
    b"nan",
    b"true",
    b"2027-01-31T00:00:00Z",
    b"\\u0000",
)
_VARIABLES = b"KVTIER_DRAM_SIZE=4GiB\nKVTIER_NODE_LISTEN=127.0.0.1:0\nKVTIER_PEERS_STATIC=b=10.0.0.2:7979,c=h:1"
TARGETS = (
    Target(
        "settings",
        settings,
        (
            (_DEPLOY / "kvtier.toml").read_bytes(),
            b'[store]\nurl = "s3://b/p"\n[dram]\nsize = "4GiB"\n[tenants.a]\nmax_bytes = "1GB"' + _APART + _VARIABLES,
            b'[prices]\nmodels = ["a=12000"]\n[tls]\ncert = "c"\nkey = "k"\n[prestage]\nheld = 90'
            + _APART
            + b"KVTIER_AUTH_ANONYMOUS=yes",
        ),
        (
            *_TOML,
            *(f"[{name}]\n".encode() for name in SECTIONS),
            *(field.encode() for kind in SECTIONS.values() for field in kind.__struct_fields__),
        ),
        1 << 15,
    ),
    Target(
        "gateway_settings",
        gateway_settings,
        (
            (_DEPLOY / "gateway.toml").read_bytes(),
            b'model = "m"\n[engines.a]\nurl = "http://h:1"\nnode = "kvtier://h:2"'
            + _APART
            + b"b=http://h:8000,node=kvtier://h:7878,parallel=4",
        ),
        (
            *_TOML,
            *(
                field.encode()
                for kind in (gateway.GatewaySettings, gateway.EngineSettings, gateway.Bounds)
                for field in kind.__struct_fields__
            ),
        ),
        1 << 14,
    ),
    Target("tokens", tokens, (_TOKENS, b"Bearer kvt_0a1b2c3d4e5f6071_" + b"0" * 64), (*_TOML, b"tokens.", b"expires", b"sha256:")),
    Target(
        "key_file", key_file, (spelled(MasterKey("a", b"k" * 32)).encode() + spelled(MasterKey("b", b"l" * 32)).encode(),), _TOML
    ),
)
