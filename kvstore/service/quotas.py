"""What a tenant may have in the bucket, and how often it may call. Beyond that is `Overloaded`, kind `quota`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from kvstore import api
from kvstore.accounts import Accounts
from kvstore.clock import Clock
from kvstore.config import Tenant
from kvstore.errors import Gone, KVTierError, NotFound, Overloaded

_FREE: Final = frozenset({"health", "ready", "stats"})  # whoever watches a node must not be kept out by those it watches
_MAKES: Final = frozenset({"create_session", "fork", "warm", "commit"})  # calls that may end in one session more
_BURST_S: Final = 2.0  # calls that did not come are kept for that long
_REMEDIES: Final = {"requests": "ask less often", "max_sessions": "delete sessions", "max_bytes": "delete sessions, then collect"}
_LATER_S: Final = 60  # for bytes and sessions: somebody has to delete something
_LEAST_S: Final = 10.0  # between two counts of sessions,
_REST: Final = 20  # and so many times as long as a count took

CountSessions = Callable[[str, int], Awaitable[int]]  # of a tenant, up to a number
Exists = Callable[[str, api.Commit], Awaitable[object]]  # raises `NotFound` or `Gone` where it does not


class Rate:
    """So many a second, some of them at once.

    Args:
        per_s: How many.
        now: The clock's time.
    """

    def __init__(self, per_s: float, now: float) -> None:
        self._per_s, self._most = per_s, max(1.0, per_s * _BURST_S)
        self._left, self._at = self._most, now

    def take(self, now: float) -> float:
        """One more: 0.0, or the seconds until there will be one."""
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0


class _Sessions:
    """How many a tenant has: counted in the bucket, and carried on by what this node makes and deletes.

    Other nodes' are seen at the next count. That comes when the number seems reached, and not often: it reads every head.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.known: int | None = None
        self.again = -math.inf  # on the monotonic clock: not before


class Quotas:
    """Of all tenants of a node; those without any cost a look into a dictionary.

    Args:
        tenants: Their settings.
        accounts: What this node has stored for them.
        usage: What is alive in the bucket, by the last collection; a list of its own for each.
        count: Sessions in the bucket.
        exists: Looks for the session of a commit.
        clock: Monotonic.
    """

    def __init__(
        self,
        tenants: Mapping[str, Tenant],
        accounts: Accounts,
        usage: Callable[[], list[api.Usage]],
        count: CountSessions,
        exists: Exists,
        clock: Clock,
    ) -> None:
        self._tenants = {name: one for name, one in tenants.items() if one.max_bytes or one.max_sessions or one.requests}
        self._rates = {name: Rate(one.requests, clock.monotonic()) for name, one in self._tenants.items() if one.requests}
        self._accounts, self._usage, self._count, self._exists, self._clock = accounts, usage, count, exists, clock
        self._sessions = {name: _Sessions() for name, one in self._tenants.items() if one.max_sessions}
        self._seen: list[api.Usage] | None = None
        self._before: dict[str, int] = {}  # what this node had stored by the last collection

    @asynccontextmanager
    async def admitted(self, tenant: str, name: str, request: api.Request) -> AsyncIterator[None]:
        """Around a call. Raises `Overloaded` where it may not begin."""
        made = tenant in self._tenants and name not in _FREE and await self._admit(tenant, name, request)
        try:
            yield
        except BaseException:
            self._add(tenant, -made)  # in doubt it is taken to have failed: the next count knows
            raise
        if name == "delete_session":
            self._add(tenant, -1)

    async def _admit(self, tenant: str, name: str, request: api.Request) -> bool:
        """Whether a session more is counted for it."""
        self.take(tenant)
        if isinstance(request, api.Commit) and self.full(tenant):
            held, most = self._held(tenant), self._tenants[tenant].max_bytes
            raise _refused(f"tenant {tenant!r} has {held} bytes in the bucket; it may have {most}", tenant, "max_bytes", _LATER_S)
        return name in _MAKES and tenant in self._sessions and await self._make(tenant, request)

    def take(self, tenant: str) -> None:
        """One request more. Raises `Overloaded`."""
        wait = self._rates[tenant].take(self._clock.monotonic()) if tenant in self._rates else 0.0
        if wait:
            limit = self._tenants[tenant].requests
            raise _refused(f"tenant {tenant!r} may make {limit:g} requests per second", tenant, "requests", math.ceil(wait))

    def full(self, tenant: str) -> bool:
        """Whether a tenant has all the bytes that it may have."""
        found = self._tenants.get(tenant)
        return found is not None and bool(found.max_bytes) and self._held(tenant) >= found.max_bytes

    def _add(self, tenant: str, more: int) -> None:
        sessions = self._sessions.get(tenant)
        if sessions is not None and sessions.known is not None:
            sessions.known += more

    def _held(self, tenant: str) -> int:
        usage = self._usage()
        if usage is not self._seen:
            self._seen, self._before = usage, {name: self._kept(name) for name in self._tenants}
        alive = sum(each.bytes for each in usage if each.tenant == tenant)
        return alive + self._kept(tenant) - self._before[tenant]

    def _kept(self, tenant: str) -> int:
        return sum(account.kept for account in self._accounts if account.tenant == tenant)

    async def _make(self, tenant: str, request: api.Request) -> bool:
        if isinstance(request, api.Commit) and (request.base_version or await self._is_there(tenant, request)):
            return False
        most, sessions = self._tenants[tenant].max_sessions, self._sessions[tenant]
        async with sessions.lock:
            begun = self._clock.monotonic()
            if sessions.known is None or (sessions.known >= most and begun >= sessions.again):
                try:
                    sessions.known = await self._count(tenant, most)
                except KVTierError:
                    return False  # nobody can tell now; where the bucket is needed, the call says so itself
                took = self._clock.monotonic() - begun
                sessions.again = begun + took + max(_LEAST_S, _REST * took)
        if sessions.known >= most:
            raise _refused(f"tenant {tenant!r} has {sessions.known} sessions; it may have {most}", tenant, "max_sessions", _LATER_S)
        sessions.known += 1
        return True

    async def _is_there(self, tenant: str, request: api.Commit) -> bool:
        """Whether the session of a commit exists; it may be at version 0. True where nobody can tell now."""
        try:
            await self._exists(tenant, request)
        except (NotFound, Gone):
            return False
        except KVTierError:
            return True
        return True


def _refused(why: str, tenant: str, setting: str, seconds: int) -> Overloaded:
    remedy = f"{_REMEDIES[setting]}; or have [tenants.{tenant}] {setting} raised"
    return Overloaded(why, kind="quota", remedy=remedy, retry_after_s=max(1, seconds))
