"""A repository: the protocol on one root of a bucket, opened and closed as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import msgspec

from kvstore.api import Receipt
from kvstore.clock import Clock, Ids
from kvstore.codec import Share
from kvstore.ids import Namespace, NamespaceId
from kvstore.keys import Keys
from kvstore.objects.base import ObjectStore
from kvstore.payer import Paying
from kvstore.repo.blocks import BucketOrigin
from kvstore.repo.chains import Source
from kvstore.repo.choice import CodecChoice, CodecSetting
from kvstore.repo.commit import Ledger, Proposal
from kvstore.repo.epochs import Epochs
from kvstore.repo.families import Families
from kvstore.repo.finding import Finder
from kvstore.repo.heads import Heads
from kvstore.repo.manifests import Manifests
from kvstore.repo.names import Names
from kvstore.repo.root import Root, Run
from kvstore.repo.sessions import Sessions
from kvstore.repo.together import Finishing
from kvstore.repo.uploads import Uploads
from kvstore.repo.writer import Writer
from kvstore.sealing import Sealing


class RepoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a repository behaves.

    Attributes:
        history: Older versions of a session that stay restorable.
        session_ttl: Seconds a session lives without renewal, where a commit makes it and says none; 0 means for ever.
        sliding: Whether commits and restores renew such a session.
        period: PERIOD: a collection advances an epoch older than this many seconds.
        codec: Of new block objects; `auto` picks for each by what link and codec are measured to carry.
        inflight: Most bytes of blocks in memory for uploads, and as many for coded reads.
        init: Whether an empty root is made a repository.
        cached_sessions: Names kept in memory; and of heads, twice as many branches and versions.
        cached_manifests: Bytes of manifests kept in memory.
        known_blocks: Blocks whose newest copy is remembered.
    """

    history: int = 8
    session_ttl: int = 7 * 86400
    sliding: bool = True
    period: int = 12 * 3600
    codec: CodecSetting = "raw"
    inflight: int = 256 << 20
    init: bool = True
    cached_sessions: int = 32_768
    cached_manifests: int = 64 << 20
    known_blocks: int = 1 << 16


class Repo:
    """Sessions, their blocks, and what keeps both in order.

    Attributes:
        root: Where, and by which clock.
        epochs: The register `epoch`.
        heads: The registers of families.
        manifests: The lists of blocks.
        families: The swaps of this node.
        finder: From session ids to branches.
        uploads: Blocks on their way to the bucket.
        origin: The bucket as the hierarchy's last origin.
        sessions: What users do with sessions.
    """

    def __init__(self, root: Root, run: Run, settings: RepoSettings, share: Share | None = None) -> None:
        self.root, self.settings = root, settings
        self.epochs = Epochs(root)
        self.heads = Heads(root, 2 * settings.cached_sessions)
        self.manifests = Manifests(root, settings.cached_manifests, run)
        self.families = Families(root, self.heads, self.epochs)
        self.finder = Finder(root, Names(root, settings.cached_sessions), self.heads, self.manifests)
        choice = CodecChoice(settings.codec, root.clock)
        self.uploads = Uploads(root, run, choice, inflight=settings.inflight, known=settings.known_blocks, share=share)
        self.origin = BucketOrigin(
            root,
            self.epochs,
            self.uploads,
            run,
            expects_raw=lambda: choice.current == "raw",
            inflight=settings.inflight,
            share=share,
        )
        ledger = Ledger(root, self.manifests, self.uploads, settings.history)
        self._finishing = Finishing()
        self._writer = Writer(ledger, self.epochs, self.families, self.finder, cached=settings.cached_sessions)
        self.sessions = Sessions(root, self.finder, self.families, self._writer, self._finishing, history=settings.history)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        store: ObjectStore,
        keys: Keys,
        clock: Clock,
        ids: Ids,
        run: Run,
        settings: RepoSettings | None = None,
        *,
        guarantees: dict[str, bool] | None = None,
        corrupt_reads: Counter[str] | None = None,
        share: Share | None = None,
        sealing: Sealing | None = None,
    ) -> AsyncIterator[Self]:
        """Open a root for as long as the block lasts; what was begun is finished before it ends.

        Args:
            store: Its objects; whoever opened it closes it.
            keys: Its prefix.
            clock: This host's.
            ids: Fresh names.
            run: Runs encoding and verification on threads, such as `tiering.Movers.run`.
            settings: How it behaves.
            guarantees: What the start-up probe found; kept in `format.json` of a root that is made here.
            corrupt_reads: Counts registers and manifests that were not what they claim to be, by folder.
            share: Finds threads that help with one block, such as `tiering.Movers.share`.
            sealing: Keys of a sealed root.

        Raises:
            Denied: `no_key`: it is sealed, and its keys are not these.
            Unsupported: Its format version is unknown (I10).
            Unavailable: The store is out of reach; or `store_not_initialised`: `format.json` or `epoch` is missing (R9).
        """
        settings = settings or RepoSettings()
        root = await Root.open(
            store, keys, clock, ids, init=settings.init, guarantees=guarantees, corrupt_reads=corrupt_reads, sealing=sealing
        )
        repo = cls(root, run, settings, share)
        await repo.epochs.read()
        try:
            yield repo
        finally:
            await repo._finishing.aclose()
            await repo.families.aclose()
            await repo.origin.aclose()

    async def check(self) -> None:
        """Whether the store answers and still holds this root. Raises what is wrong."""
        await self.root.check()

    async def commit(self, tenant: str, session: str, lane: str, proposal: Proposal, source: Source) -> Receipt:
        """Make a proposal the session's next version; acknowledged, it outlives this machine.

        A caller who is cancelled leaves the commit to land or not: repeated under its write id, it takes effect once.

        Args:
            tenant: Whose.
            session: Its id.
            lane: "" means `main`, or a lane of its own for a chain that shares no block with what `main` holds.
            proposal: The version.
            source: Leases bytes of blocks on this node.

        Raises:
            Conflict: The session moved; `current` is its version.
            Gone: It was deleted, or it expired.
            NotFound: There is no such session and `base` is not 0; or the bytes of its first block are nowhere.
            Invalid: The namespace is another tenant's.
            Unavailable: `outcome_unknown` where it may have landed.
        """
        work = self._writer.commit(
            tenant, session, lane, proposal, source, ttl=self.settings.session_ttl, sliding=self.settings.sliding
        )
        with Paying(tenant, proposal.namespace.id):
            return await self._finishing.run(work)

    async def put_namespace(self, namespace: Namespace) -> None:
        """Keep a namespace's fields readable under its id."""
        await self.root.put_namespace(namespace)

    async def namespace(self, namespace: NamespaceId) -> Namespace | None:
        """A namespace's fields; None where nobody registered it."""
        return await self.root.namespace(namespace)

    async def namespaces(self, tenant: str) -> list[Namespace]:
        """All of a tenant's."""
        return await self.root.namespaces(tenant)
