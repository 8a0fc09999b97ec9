"""The root of a repository in a bucket: its format, its clock, and the namespaces it holds.

Everything else of this package is handed a :class:`Root` and speaks to the store through it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, ParamSpec, Protocol, TypeVar

from cachetools import LRUCache

from kvstore.clock import Clock, Ids
from kvstore.errors import Corrupt, Denied, Invalid, KVTierError, Unavailable, Unsupported
from kvstore.ids import Namespace, NamespaceId, namespace_id
from kvstore.keys import Keys
from kvstore.model import FORMAT_VERSION, SEALED_VERSION, Epoch, Format, dump, parse, parse_namespace
from kvstore.objects.base import CREATE, Absent, Buffer, ObjectStore, PutMode, Stored, Unchanged
from kvstore.repo.together import together
from kvstore.sealing import Sealing, TenantKeyring, make_keyring, unlocked

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

MAX_REGISTER_BYTES: Final = 256 * 1024
FIRST_EPOCH: Final = 1
_CLOCK_SAMPLE_S: Final = 600.0
_NAMESPACES_CACHED: Final = 10_000
_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0
_TRIES: Final = 4


class Run(Protocol):
    """Runs a function on a thread and awaits its real end, also when the caller is cancelled (see `tiering.Movers.run`)."""

    def __call__(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        """The function's result."""
        ...


class Root:
    """An opened root: where it is, how time passes there, and how names that nobody used are made.

    Attributes:
        store: The objects.
        keys: How they are named.
        clock: This host's.
        ids: For families, branches, manifests and write ids.
        corrupt_reads: Answers that were not what they claim to be, by folder of the key: `heads`, `epoch`, ...
        tenants: Keys of a sealed root; None in a plain one.
    """

    tenants: TenantKeyring | None = None

    def __init__(self, store: ObjectStore, keys: Keys, clock: Clock, ids: Ids, corrupt_reads: Counter[str] | None = None) -> None:
        self.store, self.keys, self.clock, self.ids = store, keys, clock, ids
        self.corrupt_reads: Counter[str] = corrupt_reads if corrupt_reads is not None else Counter()
        self._offset: float | None = None  # store's clock minus our monotonic one
        self._sampled = 0.0
        self._namespaces: LRUCache[str, Namespace] = LRUCache(_NAMESPACES_CACHED)

    @classmethod
    async def open(
        cls,
        store: ObjectStore,
        keys: Keys,
        clock: Clock,
        ids: Ids,
        *,
        init: bool = True,
        guarantees: dict[str, bool] | None = None,
        corrupt_reads: Counter[str] | None = None,
        sealing: Sealing | None = None,
    ) -> Root:
        """Check that this root is one of ours.

        Args:
            store: Its objects.
            keys: Its prefix.
            clock: This host's.
            ids: Fresh names.
            init: Whether an *empty* root is made one of ours.
            guarantees: What the start-up probe found the store to guarantee; kept in `format.json` by `init`.
            corrupt_reads: Counts answers that were not what they claim to be.
            sealing: Keys: an empty root becomes a sealed one.

        Raises:
            Corrupt: Its `format.json` is damaged.
            Denied: `no_key`: it is sealed, and there are no keys, or not the right ones.
            Unsupported: Its format version is unknown (I10). `not_encrypted`: it is plain, and there are keys.
            Unavailable: `store_not_initialised`: `format.json` or `epoch` is missing under a root that holds something (R9).
        """
        root = cls(store, keys, clock, ids, corrupt_reads)
        if init:
            await root._init(guarantees or {}, sealing)
        await root._unlock(await root.check(), sealing)
        await root.now()
        return root

    async def check(self) -> Format:
        """Read `format.json`: the store answers, it is ours, and we know its format."""
        return await self.sound(self.keys.format, self._check)

    async def _check(self) -> Format:
        body = await self.register(self.keys.format)
        if body is None:
            raise _not_initialised(self.keys.format)
        return parse(body, Format, self.keys.format)

    async def _unlock(self, form: Format, sealing: Sealing | None) -> None:
        """From here on everybody sees contents and their names."""
        if form.v == FORMAT_VERSION and sealing is None:
            return
        if form.v == FORMAT_VERSION:
            raise Unsupported(
                f"{self.keys.format} says that this root is not encrypted, and [encryption] is set", kind="not_encrypted"
            )
        if sealing is None:
            raise Denied(
                f"{self.keys.format} says that this root is encrypted, and [encryption] key_file is not set", kind="no_key"
            )
        store, keys = await unlocked(self.store, self.keys, sealing, self.clock, self.ids)
        self.store, self.keys, self.tenants = store, keys, store.tenants

    async def _init(self, guarantees: dict[str, bool], sealing: Sealing | None) -> None:
        """Create `epoch`, a keyring if need be, then `format.json`, once, in an empty root. A crash in between leaves it empty."""
        if await self.register(self.keys.format) is not None:
            return
        ours = {self.keys.format, self.keys.epoch, self.keys.keyring}
        passing = (self.keys.probe(""), f"{self.keys.root}hints/")
        async for page in self.store.list(self.keys.root):
            for meta in page:
                if meta.key not in ours and not meta.key.startswith(passing):
                    raise _not_initialised(self.keys.format)
        first = Epoch(epoch=FIRST_EPOCH, write=self.ids.new())
        await self.put(self.keys.epoch, dump(first, self.keys.epoch), CREATE)
        if sealing is not None:
            await make_keyring(self.store, self.keys, sealing.masters, self.ids)
        version = FORMAT_VERSION if sealing is None else SEALED_VERSION
        made = Format(v=version, store_id=self.ids.new(), created=await self.store.now(), guarantees=guarantees)
        await self.put(self.keys.format, dump(made, self.keys.format), CREATE)

    # --- the store, as this package uses it ---

    async def sound(self, key: str, read: Callable[[], Awaitable[R]]) -> R:
        """What is read at `key`, and read once more where it is not what it claims to be.

        Damage on the way is the common kind, and the next answer is whole. What is damaged twice lies so in the store.

        Raises:
            Corrupt: Both times.
        """
        try:
            return await read()
        except Corrupt as error:
            self._note(key, "it is read again", error)
        try:
            return await read()
        except Corrupt as error:
            self._note(key, "again", error)
            raise

    def _note(self, key: str, what: str, error: Corrupt) -> None:
        self.corrupt_reads[key.removeprefix(self.keys.root).partition("/")[0]] += 1
        log.warning("a damaged answer of the store, %s: %s", what, error.message)

    async def register(self, key: str) -> bytes | None:
        """A small object's bytes, or None where it is absent."""
        got = await self.store.get(key, into=memoryview(bytearray(MAX_REGISTER_BYTES)))
        return bytes(got.data) if not isinstance(got, Absent | Unchanged) else None

    async def put(self, key: str, body: Buffer, mode: PutMode) -> bool:
        """PUT an object of which any copy is as good as ours, again where the answer was lost. False: something is there already.

        For `Create` of immutable objects and plain overwrites; never for a swap, whose lost answer needs a look at the register.
        """
        for attempt in range(1, _TRIES):
            try:
                return isinstance(await self.store.put(key, body, mode), Stored)
            except Unavailable as error:
                if error.kind == "circuit_open":
                    raise  # nothing was sent, and nothing will be for a while
                await self.pause(attempt)
        return isinstance(await self.store.put(key, body, mode), Stored)

    async def attempt(self, key: str, body: bytes, mode: PutMode) -> str | None:
        """One conditional PUT: its ETag on 200, and None on any other answer, after which the register must be read.

        A 412 is no better than a lost answer: a proxy or an SDK may have sent the request twice.
        """
        try:
            answer = await self.store.put(key, body, mode)
        except Unavailable as error:
            if error.kind == "circuit_open":
                raise  # no lost answer: nothing was sent
            return None
        return answer.etag if isinstance(answer, Stored) else None

    async def pause(self, attempt: int) -> None:
        """Wait before the next attempt, longer each time, never in step with others."""
        await self.clock.sleep(min(_LONGEST_PAUSE_S, _PAUSE_S * 2**attempt) * self.ids.jitter())

    async def now(self) -> float:
        """The store's clock, for retention only. Asked at most every ten minutes; in between our monotonic clock carries it on."""
        moment = self.clock.monotonic()
        if self._offset is None or moment - self._sampled > _CLOCK_SAMPLE_S:
            try:
                self._offset = await self.store.now() - self.clock.monotonic()
            except Unavailable:
                if self._offset is None:
                    raise
            self._sampled = moment
        return self._offset + self.clock.monotonic()

    # --- namespaces ---

    async def put_namespace(self, namespace: Namespace) -> None:
        """Keep a namespace's fields readable under its id; written once per process."""
        if namespace.id not in self._namespaces:
            await self.put(self.keys.namespace(namespace.id), namespace.canonical_json(), CREATE)
            self._namespaces[namespace.id] = namespace

    async def namespace(self, namespace: NamespaceId) -> Namespace | None:
        """A namespace's fields; None where nobody registered it. Raises `Corrupt` where they are not those of that id."""
        known = self._namespaces.get(namespace)
        if known is None:
            key = self.keys.namespace(namespace)
            known = await self.sound(key, partial(self._read_namespace, key, namespace))
            if known is not None:
                self._namespaces[namespace] = known
        return known

    async def _read_namespace(self, key: str, namespace: NamespaceId) -> Namespace | None:
        body = await self.register(key)
        return None if body is None else parse_namespace(body, namespace)

    async def namespaces(self, tenant: str) -> list[Namespace]:
        """All of a tenant's, by id. What is unreadable is left out: `fsck` names it.

        Raises:
            Unavailable: The store answers nobody, or there are some and none could be read.
            Denied: None may be read.
        """
        found: list[Namespace] = []
        failed: Unavailable | Denied | None = None
        read = False
        async for page in self.store.list(self.keys.namespaces):
            ids = [meta.key.removeprefix(self.keys.namespaces).removesuffix(".json") for meta in page]
            for each in await together(self._readable, ids):
                if isinstance(each, Namespace):
                    read = True
                    found += [each] if each.tenant == tenant else []
                elif each is not None:
                    failed = each
        if failed is not None and not read:
            raise failed  # it is the store: nobody knows what there is
        return found

    async def _readable(self, text: str) -> Namespace | Unavailable | Denied | None:
        try:
            return await self.namespace(namespace_id(text))
        except (Corrupt, Invalid):
            return None
        except (Unavailable, Denied) as error:  # one object that stays so must not keep the others from being found
            if error.kind == "circuit_open":
                raise  # nothing was sent: that says nothing of this object
            return error


def outcome_unknown(what: str, cause: KVTierError | None = None) -> Unavailable:
    """What to raise when a write may or may not have landed."""
    because = f": {cause.message}" if cause is not None else ""
    return Unavailable(f"{what} may or may not have landed{because}", kind="outcome_unknown")


def _not_initialised(key: str) -> Unavailable:
    return Unavailable(
        f"{key} is missing and its root is not empty: it is no kvtier root, or was damaged", kind="store_not_initialised"
    )
