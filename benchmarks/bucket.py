"""The bucket beside bare S3 clients: blocks read into the arena and verified, and blocks put from it.

What reads and writes is what a node has, wrappers of the store and all; only the manifest is spared, since each block's copy is
known. The bare clients move the same objects, as many at once: `http.client` into the caller's memory, and obstore with the copy
that it needs. `bucket_get_raw` is whichever of them is faster here; `bucket_get_digested` is `http.client` and one BLAKE3 over each
whole object, about the least that verified bytes can cost. Against a server that costs nothing (`..._null`, over TLS `..._tls`) the
CPU time of a client is its own; SeaweedFS is the limit on two cores.
"""

from __future__ import annotations

import asyncio
import operator
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager, nullcontext
from http.client import OK, HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import uvloop
from _cases import MIB, Case, timed
from blake3 import blake3
from obstore.store import S3Store as Obstore

from kvstore import codec
from kvstore.clock import Clock, Ids, RandomIds, SystemClock
from kvstore.ids import BlockName, Namespace, Shard, chain
from kvstore.keys import Keys
from kvstore.lifecycle.health import StoreSigns
from kvstore.model import Copy
from kvstore.objects import ObjectStore, S3Store
from kvstore.objects.base import OVERWRITE
from kvstore.objects.breaker import BreakingStore
from kvstore.objects.counting import CountingStore
from kvstore.objects.credentials import Credentials
from kvstore.objects.hedge import HedgingStore
from kvstore.objects.ranged import RangedStore
from kvstore.objects.retry import RetryingStore
from kvstore.objects.seaweed import SeaweedFS
from kvstore.objects.settings import S3Settings
from kvstore.objects.signing import UNSIGNED, sign
from kvstore.repo import Repo, RepoSettings, want
from kvstore.repo.root import Root
from kvstore.repo.uploads import Wanted
from kvstore.service.bucket import Bucket
from tiering import DramSlot, DramTier, Lease, Movers, Stack, StackSettings

CASES = (
    "bucket_get", "bucket_get_raw", "bucket_get_http", "bucket_get_obstore", "bucket_get_digested", "bucket_put", "bucket_put_raw",
    "bucket_get_null", "http_null", "obstore_null", "bucket_one", "bucket_one_raw", "bucket_put_null", "obstore_put_null",
    "bucket_get_tls", "http_tls", "obstore_tls", "bucket_put_tls", "obstore_put_tls",
)  # fmt: skip
TOTAL = 256 * MIB
CALL = 128 * MIB
PARALLEL = StackSettings().fetches
PUTS = 8
NULL = "null"


def namespace_of(size: int) -> Namespace:
    """One whose blocks weigh about `size`: as many layers as an 8B model has, or for small ones as a small model."""
    layers = 32 if size > 8 * MIB else 16
    heads = max(1, size // (layers * 2 * 256 * 64 * 2))
    return Namespace(model="benchmark", revision="1", layers=layers, kv_heads=heads, head_dim=64, dtype="BF16", block_tokens=256)


@contextmanager
def cases(size: int, folder: Path) -> Iterator[dict[str, Case]]:
    """See :class:`_cases.Rows`."""
    with ExitStack() as closing:
        seaweed = SeaweedFS.launch(folder / "store")
        closing.callback(seaweed.stop)
        seaweed.wait_ready()
        sys.setswitchinterval(0.0005)  # this and the loop as in a node's process
        loop = uvloop.new_event_loop()
        closing.callback(loop.close)
        real, null, tls = Rig(loop, size), Rig(loop, size), Rig(loop, size)
        closing.callback(lambda: loop.run_until_complete(real.close()))
        loop.run_until_complete(real.open(seaweed.settings(), seaweed.credentials))
        closing.callback(lambda: loop.run_until_complete(null.close()))
        loop.run_until_complete(null.open(closing.enter_context(null_server()), Credentials("a", "b")))
        closing.callback(lambda: loop.run_until_complete(tls.close()))
        loop.run_until_complete(tls.open(closing.enter_context(null_server(*certificate(folder))), Credentials("a", "b")))
        pool = closing.enter_context(ThreadPoolExecutor(PARALLEL))
        servers = (seaweed.pid,)

        def read(run: Callable[[int], None], pids: Sequence[int] = ()) -> Case:
            return Case(run, real.call_bytes, real.calls, servers=pids)

        http_get, obstore_get = read(Bare(real, pool).http, servers), read(Bare(real, pool).obstore, servers)
        tries = [(timed(http_get)["gbps"], timed(obstore_get)["gbps"]) for _ in range(4)][1:]
        faster = http_get if sum(map(operator.itemgetter(0), tries)) > sum(map(operator.itemgetter(1), tries)) else obstore_get
        yield {
            "bucket_get": read(real.get, servers),
            "bucket_get_raw": faster,
            "bucket_get_http": http_get,
            "bucket_get_obstore": obstore_get,
            "bucket_get_digested": read(Bare(real, pool).http_digested, servers),
            "bucket_put": Case(real.put, real.call_bytes, 1, real.forget, servers),
            "bucket_put_raw": Case(Bare(real, pool).put, real.call_bytes, 1, servers=servers),
            "bucket_get_null": read(null.get),
            "http_null": read(Bare(null, pool).http),
            "obstore_null": read(Bare(null, pool).obstore),
            "bucket_one": Case(real.get_one, real.plan.raw_bytes, TOTAL // size, servers=servers),
            "bucket_one_raw": Case(Bare(real, pool).one, real.plan.raw_bytes, TOTAL // size, servers=servers),
            "bucket_put_null": Case(null.put, null.call_bytes, 1, null.forget),
            "obstore_put_null": Case(Bare(null, pool).obstore_put, null.call_bytes, 1),
            "bucket_get_tls": read(tls.get),
            "http_tls": read(Bare(tls, pool).http),
            "obstore_tls": read(Bare(tls, pool).obstore),
            "bucket_put_tls": Case(tls.put, tls.call_bytes, 1, tls.forget),
            "obstore_put_tls": Case(Bare(tls, pool).obstore_put, tls.call_bytes, 1),
        }


@contextmanager
def null_server(*certificate: Path) -> Iterator[S3Settings]:
    """In a process of its own; over TLS with a certificate that is its own authority, and its key."""
    command = [sys.executable, str(Path(__file__).with_name("_null_s3.py")), *map(str, certificate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        service, bundle = ("https://localhost", str(certificate[0])) if certificate else ("http://127.0.0.1", "")
        yield S3Settings(bucket=NULL, endpoint=f"{service}:{process.stdout.readline().strip()}", ca_bundle=bundle)


def certificate(folder: Path) -> tuple[Path, Path]:
    """PEM files of one for localhost that signed itself, and of its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    what = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    leaf = "-addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:FALSE"  # else obstore refuses it
    command = ["openssl", *what.split(), *leaf.split(), "-out", str(cert), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


class Rig:
    """A node's way to a bucket: its store and wrappers, its repository's blocks, its memory."""

    def __init__(self, loop: asyncio.AbstractEventLoop, size: int) -> None:
        self._loop, self._parts = loop, AsyncExitStack()
        self.namespace, shard = namespace_of(size), Shard()
        self.plan = codec.layout(self.namespace, shard, 256)
        blocks = TOTAL // size
        links = chain(self.namespace, np.arange(2 * blocks * 256, dtype=np.uint32))
        names = [BlockName(self.namespace.id, shard, link.prefix_id, link.tokens) for link in links]
        self.names, self.new = names[:blocks], names[blocks : blocks + CALL // size]
        self.count = CALL // size
        self.calls, self.call_bytes = TOTAL // CALL, self.count * self.plan.raw_bytes

    async def open(self, settings: S3Settings, credentials: Credentials) -> None:
        """Fill the bucket."""
        self.leases: list[Lease] = []
        self.settings, self.credentials = settings, credentials
        clock, ids = SystemClock(), RandomIds()
        enter = self._parts.enter_async_context
        movers = await enter(Movers.open())
        self.store = CountingStore(await enter(S3Store.open(settings, credentials=lambda: credentials, clock=clock)))
        signs = StoreSigns(clock, ids)
        hedging = await enter(HedgingStore.open(self.store, clock, signs.hedges))
        breaking = await enter(BreakingStore.open(hedging, signs.breaker, clock, "format.json"))
        store = RangedStore(RetryingStore(breaking, clock, ids, rest=signs.breaker.rest))
        self.repo = Repo(await self.root(store, clock, ids, movers), movers.run, RepoSettings())
        bucket = Bucket(lambda: nullcontext(self.repo), signs, {}, clock, ids)
        await bucket.open()
        self.dram = await enter(DramTier.open("dram", 2 * CALL + 64 * MIB, movers))
        self.stack = await enter(Stack.open(self.dram, None, [bucket]))
        self.wants = [want(self.namespace, name, Copy(0, 1, self.plan.raw_bytes, self.plan.header_bytes)) for name in self.names]
        self.leases = [self._made(name) for name in self.new]
        self.keys = [self.repo.uploads.key(name, 1) for name in self.names]
        for name, key in zip(self.names, self.keys, strict=True):
            with self._made(name) as lease:
                await self.repo.root.store.put(key, lease.view, OVERWRITE)
            self.dram.discard_many([name.tier_key])

    async def root(self, store: ObjectStore, clock: Clock, ids: Ids, movers: Movers) -> Root:  # noqa: ARG002  of others' use
        """Where blocks go."""
        return Root(store, Keys("kv"), clock, ids)

    async def close(self) -> None:
        """Empty it."""
        for lease in self.leases:
            lease.release()
        await self._parts.aclose()

    def get(self, call: int) -> None:
        """Blocks that are in the bucket only."""
        self._get(self.wants[call * self.count : (call + 1) * self.count])

    def get_one(self, call: int) -> None:
        """One block, alone."""
        self._get([self.wants[call]])

    def put(self, _: int) -> None:
        """Blocks in memory, as a commit brings them to the bucket."""
        held = dict(zip(self.new, self.leases, strict=True))

        async def source(name: BlockName) -> Lease | None:
            found = self.dram.lease(want(self.namespace, name))
            return found if isinstance(found, Lease) else None

        copies = self._loop.run_until_complete(self.repo.uploads.secure([Wanted(name) for name in held], self.namespace, 1, source))
        assert all(copies)

    def forget(self) -> None:
        """What `put` wrote."""
        for name in self.new:
            self.repo.uploads.forget(name, 1)
        if self.settings.bucket != NULL:
            keys = [self.repo.uploads.key(name, 1) for name in self.new]
            assert not self._loop.run_until_complete(self.store.delete(keys))

    def slots(self, wants: Sequence[Any]) -> list[DramSlot]:
        """Room in the arena for a bare client."""
        found = [self.dram.reserve(want) for want in wants]
        assert all(isinstance(slot, DramSlot) for slot in found)
        return [slot for slot in found if isinstance(slot, DramSlot)]

    def _get(self, wants: Sequence[Any]) -> None:
        leases = self._loop.run_until_complete(self.stack.get_many(wants))
        for lease in leases:
            assert isinstance(lease, Lease), lease
            lease.release()
        assert self.dram.discard_many([want.key for want in wants]) == len(wants) == len(leases)

    def _made(self, name: BlockName) -> Lease:
        slot = self.dram.reserve(want(self.namespace, name))
        assert isinstance(slot, DramSlot), slot
        noise = np.random.default_rng(int(name.prefix_id[:8], 16)).bytes(MIB)
        for at in range(self.plan.header_bytes, self.plan.raw_bytes, MIB):
            slot.view[at : at + MIB] = noise[: len(slot.view[at : at + MIB])]
        codec.seal(slot.view, name, self.namespace)
        return slot.commit()


class Bare:
    """Clients without anything around them: nothing is verified, counted, or tried again."""

    def __init__(self, rig: Rig, pool: ThreadPoolExecutor) -> None:
        self._rig, self._pool = rig, pool
        address = rig.settings.address()
        self._host, self._port, self._authority, self._path = address.host, address.port, address.authority, address.path
        self._idle: list[HTTPConnection] = []
        bundle = rig.settings.ca_bundle
        self._tls = ssl.create_default_context(cafile=bundle) if bundle else None
        self._store = Obstore(
            rig.settings.bucket,
            endpoint=address.url,
            access_key_id=rig.credentials.access_key,
            secret_access_key=rig.credentials.secret_key,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, **({"root_certificate": Path(bundle).read_text()} if bundle else {})},
        )

    def http(self, call: int) -> None:
        """`http.client`, straight into the arena."""
        self._gets(call, self._http_get)

    def http_digested(self, call: int) -> None:
        """`http.client`, straight into the arena, and a digest of each whole object."""

        def get(key: str, into: memoryview) -> None:
            self._http_get(key, into)
            blake3(into).digest()

        self._gets(call, get)

    def obstore(self, call: int) -> None:
        """obstore, and a copy into the arena."""
        self._gets(call, self._obstore_get)

    def one(self, call: int) -> None:
        """A single GET, by `http.client`."""
        [slot] = self._rig.slots([self._rig.wants[call]])
        self._http_get(self._rig.keys[call], slot.view)
        slot.abort()

    def put(self, _: int) -> None:
        """`http.client`, straight from the arena."""
        self._puts(self._http_put)

    def obstore_put(self, _: int) -> None:
        """obstore, straight from the arena."""
        self._puts(lambda key, view: obstore.put(self._store, key, view, use_multipart=False))

    def _gets(self, call: int, get: Callable[[str, memoryview], None]) -> None:
        some = slice(call * self._rig.count, (call + 1) * self._rig.count)
        slots = self._rig.slots(self._rig.wants[some])
        list(self._pool.map(get, self._rig.keys[some], [slot.view for slot in slots]))
        for slot in slots:
            slot.abort()

    def _puts(self, put: Callable[[str, memoryview], object]) -> None:
        todo = iter([(f"raw/{index}", lease.view) for index, lease in enumerate(self._rig.leases)])

        def some() -> None:
            for key, view in todo:  # a list's iterator may be shared
                put(key, view)

        for done in [self._pool.submit(some) for _ in range(PUTS)]:
            done.result()

    def _http_get(self, key: str, into: memoryview) -> None:
        answer, connection = self._ask("GET", key, None)
        filled = 0
        while filled < len(into):
            filled += answer.readinto(into[filled:])
        assert not answer.read()
        self._idle.append(connection)

    def _http_put(self, key: str, body: memoryview) -> None:
        answer, connection = self._ask("PUT", key, body)
        answer.read()
        self._idle.append(connection)

    def _ask(self, method: str, key: str, body: memoryview | None) -> tuple[HTTPResponse, HTTPConnection]:
        connection = self._idle.pop() if self._idle else self._connect()
        path = f"{self._path}/{key}"
        headers = sign(
            self._rig.credentials,
            self._rig.settings.region,
            method=method,
            host=self._authority,
            path=path,
            query="",
            headers={},
            payload=UNSIGNED,
            at=SystemClock().now(),
        )
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        assert answer.status == OK, answer.read()
        return answer, connection

    def _connect(self) -> HTTPConnection:
        if self._tls is None:
            return HTTPConnection(self._host, self._port)
        return HTTPSConnection(self._host, self._port, context=self._tls)

    def _obstore_get(self, key: str, into: memoryview) -> None:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(memoryview(obstore.get(self._store, key).bytes()), np.uint8))
