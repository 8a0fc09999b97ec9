"""Who may do what: access tokens and what they allow, as values. Files and headers are read by others.

A token is `kvt_<id>_<secret>`. The file of tokens holds its SHA-256, never the token: the secret is 256 random bits, so that nobody
can guess a text with that digest, and a slow hash would add nothing. It is TOML::

    [tokens.0a1b2c3d4e5f6071]
    hash = "sha256:..."
    tenant = "research"
    expires = 2027-01-31T00:00:00Z   # left out: never
    scopes = ["read", "write"]

A text without a table of tokens is refused, not read as "nobody": that is what is left of a file that was emptied or cut. None at
all is `[tokens]`. An entry ends with a field that it must have, so that one that was cut is an error and never lives for ever.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal, get_args

import msgspec

from kvstore.errors import Denied, Invalid
from kvstore.keys import check_id
from kvstore.toml_text import parse_toml

if TYPE_CHECKING:
    from kvstore.clock import Ids

Scope = Literal["read", "write", "admin", "metrics"]
Need = Literal["open", "read", "write", "admin", "metrics"]
"""What a call asks of its caller: a scope, or nothing (`open`), which is for what says nothing of any tenant."""

SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
MAX_FILE: Final = 4 << 20
_FIRST_YEAR, _LAST_YEAR = 1001, 9998  # in any time zone it has four digits, and is a time that Python knows
_TOKEN: Final = re.compile(r"kvt_([0-9a-f]{16})_[0-9a-f]{64}")
_ID: Final = re.compile(r"[0-9a-f]{16}")
_HASH: Final = re.compile(r"sha256:[0-9a-f]{64}")
_NO_HASH: Final = "sha256:" + "0" * 64  # what an unknown token is compared with, so that its id cannot be told from its time
_HOW: Final = "set KVTIER_TOKEN or KVTIER_TOKEN_FILE, or token_file= in the node's URL; `kvtier tokens create` makes a token"
WHOLE: Final = (
    "mend the file, or put a whole one in its place by renaming; a new one (`kvtier tokens create`) revokes the tokens of the old"
)
"""What to do about a file that is not one of tokens."""
_HEAD: Final = "# Access tokens of kvtier, hashed. Written by `kvtier tokens`; a node reads it again when it changes.\n"


class Access(msgspec.Struct, frozen=True):
    """Who asks, and what that allows.

    Attributes:
        tenant: Whom it acts for; "" for nobody.
        scopes: What it may; `admin` includes the others, `write` does not include `read`.
        token: Id of its token, for logs; "" where it has none.
    """

    tenant: str
    scopes: frozenset[Scope] = frozenset()
    token: str = ""

    def may(self, need: Need) -> bool:
        """Whether it is allowed."""
        return need == "open" or need in self.scopes or "admin" in self.scopes

    def check(self, need: Need) -> None:
        """Raises `Denied` where it is not allowed."""
        if self.may(need):
            return
        if not self.tenant:
            raise unauthenticated("this needs an access token")
        held = ", ".join(sorted(self.scopes)) or "none"
        raise Denied(f"this needs scope {need!r}; the caller has {held}", remedy=f"use a token with scope {need!r}")


NOBODY: Final = Access("")


def everything(tenant: str) -> Access:
    """All that one can do for a tenant, and for the node."""
    return Access(tenant, frozenset(SCOPES))


def unauthenticated(message: str) -> Denied:
    """It is not known who asks."""
    return Denied(message, kind="unauthenticated", remedy=_HOW)


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """An access token, as the file has it.

    Attributes:
        hash: `sha256:` and 64 hex digits, of the token's text.
        tenant: Whom it acts for.
        scopes: See `Access`.
        expires: From when on it is refused; None means never.
    """

    hash: str
    tenant: str
    scopes: tuple[Scope, ...]
    expires: datetime | None = None


class Tokens:
    """All tokens of a file, by id."""

    def __init__(self, known: Mapping[str, Token]) -> None:
        self.known = dict(known)

    @classmethod
    def parse(cls, text: str, name: str = "the tokens file", *, blank: bool = False) -> Tokens:
        """From a file's text. Raises `Invalid`, which names the entry and never repeats a hash.

        Args:
            text: TOML.
            name: Of the file, for messages.
            blank: Whether a text that says nothing of tokens is a file to begin, or refused.
        """
        document = parse_toml(text, name)
        if not document and not blank:
            raise Invalid(f"{name} has no tokens and does not say [tokens]: it is empty, or was cut", remedy=WHOLE)
        table = document.pop("tokens", {})
        if document or not isinstance(table, dict):
            raise Invalid(f"{name} may have [tokens.<id>] tables only")
        return cls({token_id: _token(token_id, fields, name) for token_id, fields in table.items()})

    def text(self) -> str:
        """As `parse` reads it."""
        entries = [_written(token_id, token) for token_id, token in sorted(self.known.items())]
        return "\n".join([_HEAD, *(entries or ["[tokens]\n"])])

    def of(self, text: str, now: float) -> Access:
        """Whose token this is; `now` in seconds since the epoch.

        Raises:
            Denied: It is no token, nobody's, or expired (kind `unauthenticated`); the message does not repeat it.
        """
        token_id = id_of(text)
        if not token_id:
            raise unauthenticated("the access token is malformed: it looks like kvt_<id>_<secret>")
        found = self.known.get(token_id)
        right = hmac.compare_digest(hashed(text), found.hash if found is not None else _NO_HASH)
        if found is None or not right:
            raise unauthenticated("the access token is not known here")
        if found.expires is not None and found.expires.timestamp() <= now:
            raise unauthenticated(f"access token {token_id} expired at {_moment(found.expires)}")
        return Access(found.tenant, frozenset(found.scopes), token_id)

    def holds(self, token_id: str, seen: Token, now: float) -> bool:
        """Whether what was seen of a token still lets in whoever showed it: it is the same one, allows no less, and is not over."""
        found = self.known.get(token_id)
        if found is None or (found.hash, found.tenant) != (seen.hash, seen.tenant) or not set(seen.scopes) <= set(found.scopes):
            return False
        return found.expires is None or found.expires.timestamp() > now


def new_token(ids: Ids, tenant: str, scopes: Iterable[Scope], expires: datetime | None = None) -> tuple[str, str, Token]:
    """A token that nobody had before: its text, which is kept nowhere, its id, and what the file gets."""
    token_id = ids.new()[:16]
    text = f"kvt_{token_id}_{ids.new()}{ids.new()}"
    return text, token_id, Token(hash=hashed(text), tenant=check_id(tenant, "tenant"), scopes=tuple(scopes), expires=expires)


def bearer(header: str) -> str:
    """The token of an `Authorization` header; "" where there is no header. Raises `Denied` for another kind of credentials."""
    if not header:
        return ""
    scheme, _, token = header.strip().partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise unauthenticated("the Authorization header must be `Bearer <token>`")
    return token.strip()


def id_of(text: str) -> str:
    """The id in a token's text, which is no secret; "" where it is malformed."""
    match = _TOKEN.fullmatch(text)
    return match[1] if match is not None else ""


def hashed(text: str) -> str:
    """What the file keeps of a token."""
    return "sha256:" + hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _token(token_id: str, fields: object, name: str) -> Token:
    where = f"{name}: tokens.{token_id[:64]}"
    if not _ID.fullmatch(token_id):
        raise Invalid(f"{where}: an id has 16 lower-case hex digits")
    if not isinstance(fields, dict) or (unknown := sorted(fields.keys() - set(Token.__struct_fields__))):
        known = ", ".join(Token.__struct_fields__)
        raise Invalid(
            f"{where}: unknown field {unknown[0]!r}; known: {known}" if isinstance(fields, dict) else f"{where}: no table"
        )
    try:
        found = msgspec.convert(fields, Token)
    except msgspec.ValidationError as error:
        raise Invalid(f"{where}: {error}") from None
    if not _HASH.fullmatch(found.hash):
        raise Invalid(f"{where}: hash must be `sha256:` and 64 lower-case hex digits")
    if found.expires is not None and (found.expires.tzinfo is None or not _FIRST_YEAR <= found.expires.year <= _LAST_YEAR):
        raise Invalid(f"{where}: expires must name its time zone and a year of four digits, like 2027-01-31T00:00:00Z")
    check_id(found.tenant, f"{where}: tenant")
    return found


def _written(token_id: str, token: Token) -> str:
    lines = [
        f"[tokens.{token_id}]",
        f'hash = "{token.hash}"',
        f"tenant = {json.dumps(token.tenant, ensure_ascii=False)}",
        *([f"expires = {_moment(token.expires)}"] if token.expires is not None else []),
        f"scopes = {json.dumps(list(token.scopes))}",
    ]
    return "\n".join(lines) + "\n"


def _moment(when: datetime) -> str:
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
