"""Every error, named by what the caller should do about it.

::

    KVTierError
    ├── Conflict        your base moved: re-read, then rebase or fork
    ├── Unavailable     the outcome is unknown, or the service is out of reach: retry later
    ├── Overloaded      back off; a queue, budget or quota is full
    ├── NotFound        there is no such thing
    ├── Gone            it was deleted or it expired
    ├── AlreadyExists   the name is taken
    ├── Denied          credentials or rights are missing
    ├── Invalid         fix the call
    │   └── TooManyBranches
    ├── Corrupt         bytes are not what they claim: quarantine, treat as a miss
    ├── Closed          the object was closed
    └── Unsupported     the store, or this stage, lacks what the call needs

A *miss* is never an exception: it is a value (see :class:`tiering.Miss`).

Each error carries a ``kind``, a word that is only ever added to, never renamed: programs may match on it. ``KINDS`` is the
one table that maps a kind to its class, HTTP status, exit code and remedy; ``docs/errors.md`` is generated from it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

EXIT_FAILED, EXIT_USAGE, EXIT_NOT_FOUND, EXIT_UNAVAILABLE = 1, 2, 3, 4


class KVTierError(Exception):
    """Base of every error kvtier raises on purpose.

    Args:
        message: One sentence that names the field or object and what is wrong with it.
        kind: A key of ``KINDS``; by default the class's own.
        remedy: What to do next, where it is more precise than the kind's own remedy.
        facts: Small values a program can use, such as ``current=7`` for a conflict. Never secrets.
    """

    default_kind: ClassVar[str] = "internal"

    def __init__(self, message: str, *, kind: str = "", remedy: str = "", **facts: str | int) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind or self.default_kind
        self.facts = facts
        self._remedy = remedy
        if remedy:
            self.add_note(f"What to do: {remedy}")  # where only a traceback is shown, as by an engine that does not start

    @property
    def remedy(self) -> str:
        """What the caller should do next."""
        return self._remedy or KINDS[self.kind].remedy

    def problem(self) -> Problem:
        """This error as an RFC 9457 problem document."""
        known = KINDS[self.kind]
        return Problem(
            type=f"urn:kvtier:error:{self.kind}",
            title=known.error.__name__,
            status=known.http,
            detail=self.message,
            kind=self.kind,
            remedy=self.remedy,
            facts=dict(self.facts),
        )


class Conflict(KVTierError):
    """Your base moved: read again, then rebase or fork."""

    default_kind = "conflict"


class Unavailable(KVTierError):
    """The outcome is unknown, or the service is out of reach: retry later."""

    default_kind = "unavailable"


class Overloaded(KVTierError):
    """A queue, a budget or a quota is full: back off."""

    default_kind = "overloaded"


class NotFound(KVTierError):
    """There is no such thing."""

    default_kind = "not_found"


class Gone(KVTierError):
    """It was deleted, or it expired."""

    default_kind = "gone"


class AlreadyExists(KVTierError):
    """The name is taken by something alive."""

    default_kind = "already_exists"


class Denied(KVTierError):
    """Credentials or rights are missing."""

    default_kind = "denied"


class Invalid(KVTierError):
    """The call itself is wrong: fix it."""

    default_kind = "invalid"


class TooManyBranches(Invalid):
    """A family of sessions is full."""

    default_kind = "too_many_branches"


class Corrupt(KVTierError):
    """Bytes are not what they claim to be: quarantine them and treat them as a miss."""

    default_kind = "corrupt"


class Closed(KVTierError):
    """The object was closed, or belongs to another process."""

    default_kind = "closed"


class Unsupported(KVTierError):
    """The store, or the configured stage, lacks what this call needs."""

    default_kind = "unsupported"


class Kind(msgspec.Struct, frozen=True):
    """What a kind means to HTTP, to the shell and to a person."""

    error: type[KVTierError]
    http: int
    exit: int
    remedy: str


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RFC 9457 problem details, as HTTP bodies and socket answers carry them."""

    type: str
    title: str
    status: int
    detail: str
    kind: str
    remedy: str = ""
    facts: dict[str, Any] = {}

    def error(self) -> KVTierError:
        """The exception this document describes; an unknown kind (a newer peer) falls back on the HTTP status."""
        known = KINDS.get(self.kind)
        if known is None:
            known = next((k for k in KINDS.values() if k.http == self.status), KINDS["internal"])
            return known.error(self.detail, remedy=self.remedy)
        return known.error(self.detail, kind=self.kind, remedy=self.remedy, **self.facts)


def of_kind(kind: str, message: str, remedy: str = "") -> KVTierError:
    """An error that was handed on as its kind and its sentence; a kind that only a newer peer knows becomes the base class."""
    known = kind if kind in KINDS else "internal"
    return KINDS[known].error(message, kind=known, remedy=remedy)


KINDS: dict[str, Kind] = {
    "internal": Kind(KVTierError, 500, EXIT_FAILED, "this is a defect of kvtier: report it with the log line of this request"),
    "conflict": Kind(
        Conflict, 409, EXIT_FAILED, "read the session again, then commit on its current version, or fork at the common prefix"
    ),
    "unavailable": Kind(
        Unavailable, 503, EXIT_UNAVAILABLE, "retry with back-off; `kvtier doctor` names the part that does not answer"
    ),
    "timeout": Kind(
        Unavailable, 504, EXIT_UNAVAILABLE, "retry with a longer deadline, or look at the store's latency with `kvtier stats`"
    ),
    "outcome_unknown": Kind(
        Unavailable, 503, EXIT_UNAVAILABLE, "the write may or may not have landed: read the session before writing again"
    ),
    "promise_pending": Kind(
        Unavailable,
        503,
        EXIT_UNAVAILABLE,
        "retry, or ask the node that promised it; where that does not help, restore the session, and commit on what it holds",
    ),
    "store_busy": Kind(Unavailable, 503, EXIT_UNAVAILABLE, "the store asks for fewer requests: back off"),
    "circuit_open": Kind(
        Unavailable,
        503,
        EXIT_UNAVAILABLE,
        "the store failed several times in a row and is left alone until a probe finds it answering: retry later",
    ),
    "store_conflict": Kind(Unavailable, 503, EXIT_UNAVAILABLE, "two conditional writes met inside the store (409): retry"),
    "clock_skew": Kind(
        Unavailable, 503, EXIT_UNAVAILABLE, "set this host's clock (NTP): it differs from the store's by more than is allowed"
    ),
    "no_bucket": Kind(
        Unavailable, 503, EXIT_UNAVAILABLE, "create the bucket, or correct its name or the endpoint in the store's URL"
    ),
    "untrusted_certificate": Kind(
        Unavailable,
        503,
        EXIT_UNAVAILABLE,
        "set `ca_bundle=` in the store's URL to the authority that signed the server's certificate, not to that certificate",
    ),
    "store_not_initialised": Kind(
        Unavailable,
        503,
        EXIT_UNAVAILABLE,
        "run `kvtier doctor`: format.json or epoch is missing under the root; restore them or use an empty root",
    ),
    "overloaded": Kind(Overloaded, 429, EXIT_UNAVAILABLE, "back off and retry; raise the limit it names if this is normal load"),
    "quota": Kind(Overloaded, 429, EXIT_UNAVAILABLE, "a tenant's quota is used up: see [tenants.<name>] of the node's settings"),
    "not_found": Kind(NotFound, 404, EXIT_NOT_FOUND, "check the name; `kvtier sessions ls` shows what exists"),
    "gone": Kind(Gone, 410, EXIT_NOT_FOUND, "the session was deleted or expired: create it again"),
    "key_destroyed": Kind(
        Gone,
        410,
        EXIT_NOT_FOUND,
        "the tenant's keys were deleted on purpose: use another, for its id cannot be used again under this prefix; "
        "`kvtier tenants rm` drops its sessions",
    ),
    "already_exists": Kind(AlreadyExists, 409, EXIT_FAILED, "choose another name, or delete the session that has it"),
    "denied": Kind(Denied, 403, EXIT_FAILED, "check the credentials and the rights of the principal"),
    "unauthenticated": Kind(
        Denied,
        401,
        EXIT_FAILED,
        "give an access token that is valid here: KVTIER_TOKEN, KVTIER_TOKEN_FILE or token_file= in the URL",
    ),
    "bad_credentials": Kind(Denied, 403, EXIT_FAILED, "the store rejects the access key or its signature: check the credentials"),
    "expired_credentials": Kind(
        Denied,
        403,
        EXIT_FAILED,
        "the session token expired and no newer one was found: renew it where the credential chain reads it",
    ),
    "no_credentials": Kind(
        Denied,
        403,
        EXIT_FAILED,
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or allow instance metadata in [store]",
    ),
    "access_denied": Kind(
        Denied, 403, EXIT_FAILED, "the key is valid and lacks a right: allow Get, Put, Delete on the prefix and List on the bucket"
    ),
    "no_key": Kind(
        Denied,
        403,
        EXIT_FAILED,
        "set [encryption] key_file to the file with the master key this root was sealed under; nothing is lost meanwhile",
    ),
    "invalid": Kind(Invalid, 400, EXIT_USAGE, "correct the field the message names"),
    "wrong_region": Kind(Invalid, 400, EXIT_USAGE, "set `region=` in the store's URL to the bucket's own region"),
    "too_many_branches": Kind(
        TooManyBranches, 400, EXIT_USAGE, "fork into a new family (`detach`), or delete branches nobody needs"
    ),
    "corrupt": Kind(
        Corrupt,
        422,
        EXIT_FAILED,
        "the bytes were quarantined; the session goes on with a shorter prefix, `kvtier fsck --repair` cleans up",
    ),
    "unknown_format": Kind(Unsupported, 501, EXIT_FAILED, "this root was written by a newer kvtier: upgrade, or use another root"),
    "closed": Kind(Closed, 503, EXIT_FAILED, "open it again"),
    "forked": Kind(
        Closed,
        503,
        EXIT_FAILED,
        "the store was opened before fork(): use the `spawn` start method, or connect the child to a node by URL",
    ),
    "unsupported": Kind(Unsupported, 501, EXIT_FAILED, "configure what the message names, or use another store"),
    "not_encrypted": Kind(
        Unsupported,
        501,
        EXIT_FAILED,
        "choose another prefix in store.url: a root is encrypted from its first object on, or never; or unset encryption.key_file",
    ),
    "unsafe_store": Kind(
        Unsupported,
        501,
        EXIT_FAILED,
        "this store ignores conditional writes, so two writers could both win: use AWS S3, SeaweedFS or a recent MinIO",
    ),
    "version_mismatch": Kind(Unsupported, 426, EXIT_FAILED, "run client and node of neighbouring minor versions"),
}
