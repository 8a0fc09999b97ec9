"""On whose behalf the work at hand is done: whom a store request is counted for, and in whose line it waits.

It goes with the task, as a cancellation does. Between a call and the requests it ends in lies much that has no use for tenants.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Final, NamedTuple


class Payer(NamedTuple):
    """Who.

    Attributes:
        tenant: "" for a node's own work, such as collections and looks at the store's health.
        namespace: Its id; "" where the work is of none in particular, such as a list of sessions.
    """

    tenant: str
    namespace: str = ""


NOBODY: Final = Payer("")
_current: ContextVar[Payer] = ContextVar("payer", default=NOBODY)


def payer() -> Payer:
    """For whom the caller works."""
    return _current.get()


class Paying:
    """What is done inside the block, tasks begun in it included, is done for them."""

    __slots__ = ("_payer", "_token")

    def __init__(self, tenant: str, namespace: str = "") -> None:
        self._payer = Payer(tenant, namespace)

    def __enter__(self) -> None:
        self._token: Token[Payer] = _current.set(self._payer)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)
