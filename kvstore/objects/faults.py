"""A store that fails on purpose, by a script, and writes down every request: for tests, simulations and cost assertions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal, NamedTuple, NoReturn, TypeAlias, TypeVar

import msgspec

from kvstore.clock import Clock, SystemClock
from kvstore.errors import KVTierError, Unavailable
from kvstore.objects.base import Absent, Arrived, Buffer, Got, ObjectMeta, ObjectStore, PutMode, Refused, Stored, Unchanged

_T = TypeVar("_T")

Verb: TypeAlias = Literal["get", "head", "put", "copy", "list", "delete", "now", "*"]
Action: TypeAlias = Literal["before", "lost", "busy", "stall", "slow", "crash-before", "crash-after", "corrupt"]


class Crash(BaseException):
    """The process died at this point. Not an `Exception`, so that no handler of the code under test survives it."""


class RequestLog(NamedTuple):
    """A request: its outcome is `ok`, the name of a value (`Absent`, `Refused`, `Unchanged`), an error's kind, or `crash`."""

    verb: str
    key: str
    outcome: str


class Fault(msgspec.Struct, kw_only=True):
    """What goes wrong, and when.

    Attributes:
        action: `before`: `Unavailable`, nothing was sent. `lost`: it is carried out, then `Unavailable`. `busy`: as `before`, kind
            `store_busy`. `stall`: waits for `release`, then is carried out. `slow`: sleeps first. `crash-before`, `crash-after`:
            `Crash`, and every later call crashes too. `corrupt`: bits of a read's byte are flipped.
        verb: Which calls; `*` for any.
        key: Pattern (fnmatch) of the key or list prefix.
        skip: Matching calls to let pass first.
        times: Calls to hit after that.
        seconds: Of `slow`.
        at: Of `corrupt`: which byte, counted round and round.
        bits: Of `corrupt`: which bits of it.
    """

    action: Action
    verb: Verb = "*"
    key: str = "*"
    skip: int = 0
    times: int = 1
    seconds: float = 0.0
    at: int = 0
    bits: int = 0xFF

    def hits(self, verb: str, key: str) -> bool:
        """Whether it strikes this call; counts it."""
        if self.times == 0 or self.verb not in {"*", verb} or not fnmatchcase(key, self.key):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class Faults:
    """A wrapper around a store. See :class:`kvstore.objects.base.ObjectStore`.

    A crashed wrapper stays dead, so that background tasks of the "process" cannot write on; wrap the same store anew to restart.

    Args:
        store: What really holds the objects.
        script: Faults, asked in order; the first that hits counts. More may be appended at any time.
        clock: For `slow`.

    Attributes:
        requests: Everything asked, in order of completion. A listing counts one per page.
        release: Lets stalled calls go on.
    """

    def __init__(self, store: ObjectStore, script: Sequence[Fault] = (), clock: Clock | None = None) -> None:
        self._store, self._clock = store, clock or SystemClock()
        self.script: list[Fault] = list(script)
        self.requests: list[RequestLog] = []
        self.release = asyncio.Event()
        self.dead = False

    @property
    def counts(self) -> Counter[str]:
        """Requests by verb."""
        return Counter(entry.verb for entry in self.requests)

    async def get(
        self,
        key: str,
        *,
        range: tuple[int, int] | None = None,  # noqa: A002  the contract's own name
        into: memoryview | None = None,
        if_none_match: str | None = None,
        arrived: Arrived | None = None,  # noqa: ARG002  verified before, flipped bits would pass
    ) -> Got | Absent | Unchanged:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._do(
            "get", key, lambda: self._store.get(key, range=range, into=into, if_none_match=if_none_match), _flipped
        )

    async def head(self, key: str) -> ObjectMeta | Absent:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._do("head", key, lambda: self._store.head(key))

    async def put(self, key: str, body: Buffer, mode: PutMode) -> Stored | Refused:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._do("put", key, lambda: self._store.put(key, body, mode))

    async def copy(self, source: str, target: str) -> bool:
        """See :class:`kvstore.objects.base.ObjectStore`. Logged under its target."""
        return await self._do("copy", target, lambda: self._store.copy(source, target))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        seen = False
        async for page in self._store.list(prefix, start_after=start_after):
            seen = True
            yield await self._do("list", prefix, partial(_value, page))
        if not seen:
            await self._do("list", prefix, partial(_value, None))

    async def delete(self, keys: Sequence[str]) -> Sequence[str]:
        """See :class:`kvstore.objects.base.ObjectStore`. Logged under its first key."""
        return await self._do("delete", keys[0] if keys else "", lambda: self._store.delete(keys))

    async def now(self) -> float:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        return await self._do("now", "", self._store.now)

    async def aclose(self) -> None:
        """Close nothing: whoever opened the wrapped store closes it, maybe after another restart."""

    async def _do(
        self, verb: str, key: str, call: Callable[[], Awaitable[_T]], flip: Callable[[_T, Fault], _T] | None = None
    ) -> _T:
        outcome = "crash"
        try:
            if self.dead:
                raise Crash("this process is dead")
            fault = next((fault for fault in self.script if fault.hits(verb, key)), None)
            action = fault.action if fault else ""
            if fault:
                await self._ahead(fault, f"{verb} {key}")
            result = await call()
            if action == "lost":
                raise Unavailable(f"{verb} {key}: the answer was lost (injected)")
            if action == "crash-after":
                self._die(f"after {verb} {key}")
            if fault and action == "corrupt" and flip:
                result = flip(result, fault)
            outcome = type(result).__name__ if isinstance(result, Absent | Refused | Unchanged) else "ok"
            return result
        except KVTierError as error:
            outcome = error.kind
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self.requests.append(RequestLog(verb, key, outcome))

    async def _ahead(self, fault: Fault, what: str) -> None:
        match fault.action:
            case "before":
                raise Unavailable(f"{what}: not sent (injected)")
            case "busy":
                raise Unavailable(f"{what}: SlowDown (injected)", kind="store_busy")
            case "crash-before":
                self._die(f"before {what}")
            case "stall":
                await self.release.wait()
            case "slow":
                await self._clock.sleep(fault.seconds)
            case _:
                pass

    def _die(self, where: str) -> NoReturn:
        self.dead = True
        raise Crash(where)


async def _value(page: _T) -> _T:
    return page


def _flipped(found: Got | Absent | Unchanged, fault: Fault) -> Got | Absent | Unchanged:
    if not isinstance(found, Got) or not len(found.data):
        return found
    data = found.data if not found.data.readonly else memoryview(bytearray(found.data))
    data[fault.at % len(data)] ^= fault.bits
    return msgspec.structs.replace(found, data=data)
