"""The table of calls."""

from __future__ import annotations

from typing import Final

import msgspec

from kvstore.access import Need
from kvstore.api.answers import (
    Answer,
    Collected,
    Done,
    Dropped,
    Found,
    Health,
    Hinted,
    Namespaces,
    Receipt,
    RestoreStatus,
    Session,
    SessionManifest,
    SessionPage,
    Stats,
    Versions,
    Warmed,
)
from kvstore.api.requests import (
    Collect,
    Commit,
    CreateSession,
    Fork,
    GetManifest,
    GetRestore,
    Hint,
    ListSessions,
    Lookup,
    Nothing,
    OfNamespace,
    OfRestore,
    OfSession,
    OfTenant,
    PutNamespace,
    Request,
    Restore,
    Rewind,
    Touch,
    Warm,
)


class Call(msgspec.Struct, frozen=True):
    """One call: how it is named, routed, asked and answered, and who may ask.

    Attributes:
        name: Also the method of :class:`kvstore.service.Service`.
        scope: What the caller's access must include. Restores and hints move copies between tiers and change no session: `read`.
            What touches every tenant's, or all of a tenant, is `admin`.
    """

    name: str
    method: str
    path: str
    request: type[Request]
    answer: type[Answer]
    scope: Need
    about: str
    status: int = 200


_S = "/v1/sessions/{id}"
CALLS: Final[tuple[Call, ...]] = (
    Call(
        "restore",
        "POST",
        f"{_S}/restore",
        Restore,
        RestoreStatus,
        "read",
        "Bring a session's blocks into a tier; answers at once.",
        202,
    ),
    Call("get_restore", "GET", "/v1/restores/{restore_id}", GetRestore, RestoreStatus, "read", "How far a restore has come."),
    Call(
        "cancel_restore",
        "DELETE",
        "/v1/restores/{restore_id}",
        OfRestore,
        RestoreStatus,
        "read",
        "Stop a restore; what is staged stays.",
    ),
    Call("hint", "POST", f"{_S}/hint", Hint, Hinted, "read", "Say what is about to happen to a session; answers at once.", 202),
    Call("list_sessions", "GET", "/v1/sessions", ListSessions, SessionPage, "read", "Sessions by id prefix, in pages."),
    Call("get_session", "GET", _S, OfSession, Session, "read", "One session."),
    Call("versions", "GET", f"{_S}/versions", OfSession, Versions, "read", "The versions that can still be restored."),
    Call("manifest", "GET", f"{_S}/manifest", GetManifest, SessionManifest, "read", "The blocks of a version."),
    Call("create_session", "PUT", _S, CreateSession, Session, "write", "Create an empty session.", 201),
    Call("commit", "POST", f"{_S}/commit", Commit, Receipt, "write", "Make published blocks the session's next version."),
    Call("fork", "POST", f"{_S}/fork", Fork, Session, "write", "A second session that begins as this one.", 201),
    Call("warm", "POST", f"{_S}/warm", Warm, Warmed, "write", "Publish it as a pinned prefix for everyone in the tenant.", 201),
    Call("rewind", "POST", f"{_S}/rewind", Rewind, Session, "write", "Back to an earlier version or fewer tokens."),
    Call("touch", "POST", f"{_S}/touch", Touch, Session, "write", "Renew the time to live."),
    Call("pin", "POST", f"{_S}/pin", OfSession, Session, "write", "Never expire or evict it."),
    Call("unpin", "POST", f"{_S}/unpin", OfSession, Session, "write", "Let it expire again."),
    Call("delete_session", "DELETE", _S, OfSession, Done, "write", "Delete it; its blocks go with the next collections."),
    Call("list_namespaces", "GET", "/v1/namespaces", Nothing, Namespaces, "read", "What is stored for which model."),
    Call("put_namespace", "PUT", "/v1/namespaces/{namespace}", PutNamespace, Done, "write", "Make a namespace's fields known."),
    Call(
        "delete_namespace",
        "DELETE",
        "/v1/namespaces/{namespace}",
        OfNamespace,
        Dropped,
        "write",
        "Drop every session of a namespace.",
    ),
    Call(
        "delete_tenant", "DELETE", "/v1/tenants/{tenant}", OfTenant, Dropped, "admin", "Drop every session of the caller's tenant."
    ),
    Call("lookup", "POST", "/v1/lookup", Lookup, Found, "read", "How much of a chain is somewhere."),
    Call("collect", "POST", "/v1/collect", Collect, Collected, "admin", "Collect garbage once."),
    Call("stats", "GET", "/v1/stats", Nothing, Stats, "read", "Tiers, queues, requests."),
    Call("health", "GET", "/healthz", Nothing, Health, "open", "Whether the process lives."),
    Call("ready", "GET", "/readyz", Nothing, Health, "open", "Whether it may be sent work, and what is degraded."),
)
BY_NAME: Final = {call.name: call for call in CALLS}
