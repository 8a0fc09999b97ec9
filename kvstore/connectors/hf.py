"""Sessions for Hugging Face models: `past_key_values` that outlive the process that computed them.

::

    with kvstore.open_sync("kvtier+unix:///run/kvtier/node.sock") as kv:
        sessions = SessionCache(model, kv)
        past = sessions.restore("chat-42", input_ids)           # what is stored of this prompt; nothing on the first turn
        output = model.generate(input_ids, past_key_values=past.past_key_values, max_new_tokens=64)
        sessions.commit("chat-42", output, past.past_key_values)

One sequence, full attention, a transformers `DynamicCache`. torch is imported by the first `SessionCache`, not by this module.

From transformers 5.24 on, `generate` would rather have the cache as `cache=`, a name that earlier versions do not know, and warns
(FutureWarning). `past_key_values=` works with all that this module works with.
"""

from __future__ import annotations

import importlib
import logging
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from kvstore import api
from kvstore.client.choice import CHEAPER, Choice, Loading, Stored, steps
from kvstore.clock import RandomIds
from kvstore.connectors.arrivals import arrivals, populating
from kvstore.connectors.base import agreeing, common_prefix, model_namespace, usable
from kvstore.connectors.hf_passes import Passes
from kvstore.errors import Gone, Invalid, KVTierError, NotFound, Overloaded, Unavailable
from kvstore.ids import Link, NamespaceId, PrefixId, Shard, as_tokens, block_id, chain

if TYPE_CHECKING:
    from transformers import DynamicCache

    from kvstore.blocks import Blocks
    from kvstore.client import SyncClient

log = logging.getLogger(__name__)
DEADLINE_MS: Final = 60_000
MAX_REMEMBERED: Final = 4096  # sessions whose version is remembered for the next commit
_BEHIND: Final = 8
_ASKED_AGAIN: Final = {"outcome_unknown": 0.0, "promise_pending": 0.5}  # once, after so many seconds: another node is at it
_PUT_PAUSES: Final = (0.05, 0.1, 0.2, 0.4, 0.8)  # a node under load drops what it cannot take: offer it again, then give up


class Restored(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a restore delivered. The model computes the tokens that follow.

    Attributes:
        past_key_values: A `DynamicCache`; it belongs to the caller, and changing it changes nothing that is stored.
        tokens: The token ids whose KV it holds, u32 [n], n being its `get_seq_length()`.
        version: The session's version; 0 where no session was found.
        restore_id: Under which the node tells from which tiers the bytes came (`get_restore`); "" where there was no session. With
            `compute_or_load`, what it stages behind the computing; "" where there is no such thing.
        miss: Why it is shorter than what is stored of the prompt; "" where nothing is missing. `compute`: loading the rest would
            take longer than computing it.
    """

    past_key_values: DynamicCache
    tokens: np.ndarray
    version: int = 0
    restore_id: str = ""
    miss: str = ""


class SessionCache:
    """Restores and commits the KV of one model's sessions.

    A restore remembers the session's version, and the next commit builds on it: should somebody else have committed meanwhile, it
    raises `Conflict` and changes nothing.

    Args:
        model: A `PreTrainedModel` with its final weights. After training it, or loading an adapter, make a new `SessionCache`.
        kv: An open client. Its tenant is the namespace's.
        revision: Of the weights, such as a commit hash; by default a digest of a sample of them.
        model_id: What the model is called on every machine; by default where it was loaded from.
        block_tokens: Tokens per block.
        compute_or_load: Of a prompt, load only what is loaded sooner than computed, instead of all that is stored. How fast the
            model reads is learned from its own passes over prompts, by hooks on it that go with this object; how fast tiers are,
            from what is loaded. A :class:`kvstore.client.choice.Choice` may be given instead: to share it, or to tell it of passes.

    Raises:
        Unsupported: The model's cache is of a kind that cannot be stored yet.
    """

    def __init__(
        self,
        model: Any,
        kv: SyncClient,
        *,
        revision: str = "",
        model_id: str = "",
        block_tokens: int = 256,
        tenant: str = "default",
        compute_or_load: bool | Choice = False,
    ) -> None:
        self._torch = importlib.import_module("kvstore.connectors.hf_cache")  # so that importing `hf` imports no torch
        self._torch.empty_cache(model)  # refuses what cannot be stored now, not after the first turn
        self._model, self._kv = model, kv
        self.namespace = model_namespace(
            self._torch.decoder_config(model),
            revision=revision or self._torch.weights_digest(model),
            dtype=self._torch.kv_dtype(model),
            tenant=tenant,
            block_tokens=block_tokens,
            model=model_id,
            lora=self._torch.adapters(model),
        )
        self._shard = Shard()
        self._geometry = self._torch.Geometry(namespace=self.namespace, shard=self._shard)
        self._bases: OrderedDict[str, tuple[int, str]] = OrderedDict()  # version, and the session that it is one of
        self._choice: Choice | None = None
        if compute_or_load:
            self._choice = compute_or_load if isinstance(compute_or_load, Choice) else Choice()
            self._passes = Passes(model, self._choice.observe_compute)
            weakref.finalize(self, self._passes.remove)
        self._behind: deque[str] = deque(maxlen=_BEHIND)  # restores of what was not waited for

    # --- restore ---

    def restore(
        self, session_id: str, input_ids: Any = None, *, version: int | None = None, deadline_ms: int = DEADLINE_MS
    ) -> Restored:
        """The KV of a session, to its exact last token.

        Args:
            session_id: The session.
            input_ids: The whole prompt of the next turn, [n] or [1, n]. Then the cache covers what the session and the prompt
                have in common, and leaves at least one token to compute. A session that does not exist yet shares the blocks of
                others that begin alike. And a store in trouble costs a recomputation, never the request.
            version: An older version; the current one by default.
            deadline_ms: What did not arrive by then is left to be recomputed.

        Raises:
            NotFound, Gone: Without `input_ids`: there is no such session.
            Unavailable, Overloaded: Without `input_ids`: the store is out of reach.
        """
        prompt = None if input_ids is None else self._ids(input_ids)
        try:
            if prompt is not None and self._chooses(prompt):
                return self._restore_or_compute(session_id, prompt, version, deadline_ms)
            return self._restore(session_id, prompt, version, deadline_ms)
        except (NotFound, Gone):
            if prompt is None:
                raise
            self._bases.pop(session_id, None)
            return self.reuse(prompt, deadline_ms=deadline_ms)
        except (Unavailable, Overloaded) as error:
            if prompt is None:
                raise
            return self._nothing(error)

    def _restore(self, session_id: str, prompt: np.ndarray | None, version: int | None, deadline_ms: int) -> Restored:
        with ThreadPoolExecutor(1, "kvtier-restore") as beside:  # two questions at once
            begun = beside.submit(  # answered at once; it stages what `_deliver` then takes window by window
                self._kv.restore,
                session_id,
                namespace=self.namespace,
                version=version,
                tokens=() if prompt is None else prompt.tolist(),
                deadline_ms=deadline_ms,
            )
            found = self._kv.manifest(session_id, namespace=self.namespace, version=version or 0)
            restore_id = begun.result().restore_id
        self._remember(session_id, found)
        links = self._common(found.blocks, prompt)
        near = _in_memory(self._stored(links, reach="dram"))
        arriving = arrivals(self._kv, self.namespace, self._shard, links, near=near, deadline_ms=deadline_ms)
        return self._deliver(links, arriving, prompt, far=near < len(links), version=found.version, restore_id=restore_id)

    def _restore_or_compute(self, session_id: str, prompt: np.ndarray, version: int | None, deadline_ms: int) -> Restored:
        """As `_restore`; what is not worth waiting for is staged behind the computing, which tells how fast it would have been."""
        began = self._now()
        found = self._kv.manifest(session_id, namespace=self.namespace, version=version or 0)
        self._remember(session_id, found)
        links = self._common(found.blocks, prompt)
        here = self._stored(links, reach="nvme")
        tiers = here.tiers + ["bucket"] * (len(links) - here.run)
        loading = self._loading(links, tiers, prompt, deadline_ms, began)
        arriving = steps(self._kv, self.namespace, self._shard, links, loading)
        restored = self._deliver(links, arriving, prompt, far=False, loading=loading, version=found.version)
        if restored.miss != CHEAPER:
            return restored
        try:
            begun = self._kv.restore(
                session_id,
                namespace=self.namespace,
                version=version,
                tokens=prompt.tolist(),
                deadline_ms=deadline_ms,
                priority="speculative",
            )
        except KVTierError:
            return restored  # nobody waits for it
        self._behind.append(begun.restore_id)
        return msgspec.structs.replace(restored, restore_id=begun.restore_id)

    def _chooses(self, prompt: np.ndarray) -> bool:
        """Whether there is a choice: it was asked for, and the model's speed is known. Learns first what there is to be learned."""
        if self._choice is None:
            return False
        self._passes.tell()
        for _ in range(len(self._behind)):
            restore_id = self._behind.popleft()
            try:
                status = self._kv.get_restore(restore_id)
            except KVTierError:
                continue  # the node has forgotten it, or is another one now
            if status.state in {"resolving", "staging"}:
                self._behind.append(restore_id)
            elif status.by_tier.get("bucket"):
                self._choice.observe_load("bucket", status.by_tier["bucket"], status.elapsed_ms / 1000)
        return self._choice.costs.compute(0, prompt.size) is not None

    def _now(self) -> float:
        return self._choice.monotonic() if self._choice is not None else 0.0

    def _loading(self, links: Sequence[Link], tiers: Sequence[str], prompt: np.ndarray, deadline_ms: int, began: float) -> Loading:
        assert self._choice is not None
        stored = [
            Stored(link.tokens, self._geometry.block_bytes(link.tokens), tier) for link, tier in zip(links, tiers, strict=True)
        ]
        return self._choice.begin(stored, prompt.size, deadline=began + deadline_ms / 1000, began=began)

    def _common(self, links: Sequence[Link], prompt: np.ndarray | None) -> Sequence[Link]:
        """Those that a prompt can use: of the first block that differs, too, the beginning may be common."""
        return links if prompt is None else links[: agreeing(self.namespace, links, prompt) + 1]

    def reusable(self, input_ids: Any) -> int:
        """How many tokens of a prompt `reuse` would deliver now, whichever sessions they came from. Moves no KV."""
        prompt = self._ids(input_ids)
        try:
            return usable(self._stored(chain(self.namespace, prompt)).run * self.namespace.block_tokens, prompt.size)
        except (Unavailable, Overloaded) as error:
            log.warning("kvtier: look-up failed, nothing is reused: %s", error)
            return 0

    def reuse(self, input_ids: Any, *, deadline_ms: int = DEADLINE_MS) -> Restored:
        """The KV of the full blocks that a prompt begins with, whichever sessions they came from; it never fails a request."""
        prompt = self._ids(input_ids)
        try:
            chooses, began = self._chooses(prompt), self._now()
            links = chain(self.namespace, prompt)
            found = self._stored(links)
            links = links[: found.run]
            if chooses:
                loading = self._loading(links, found.tiers, prompt, deadline_ms, began)
                arriving = steps(self._kv, self.namespace, self._shard, links, loading)
                return self._deliver(links, arriving, prompt, far=False, loading=loading)
            near = _in_memory(found)
            arriving = arrivals(self._kv, self.namespace, self._shard, links, near=near, deadline_ms=deadline_ms)
            return self._deliver(links, arriving, prompt, far=near < len(links))
        except (Unavailable, Overloaded) as error:
            return self._nothing(error)

    def _nothing(self, error: Exception) -> Restored:
        log.warning("kvtier: nothing was restored, the prompt is recomputed: %s", error)
        return Restored(past_key_values=self._torch.empty_cache(self._model), tokens=as_tokens(()), miss=str(error))

    def _deliver(
        self,
        links: Sequence[Link],
        arriving: Generator[tuple[Sequence[Link], Blocks], None, None],
        prompt: np.ndarray | None,
        *,
        far: bool,
        loading: Loading | None = None,
        **about: Any,
    ) -> Restored:
        """Copy blocks into a new cache, each byte once, until the prompt or what arrives ends. `far`: some must be waited for."""
        stored = sum(link.tokens for link in links)
        limit = stored if prompt is None else usable(stored, prompt.size)
        room, tokens = self._geometry.room(self._model, limit), np.empty(limit, "<u4")
        done, miss = 0, ""
        parent: NamespaceId | PrefixId = self.namespace.id
        pages = room.pages if far else None
        with closing(arriving), closing(room), nullcontext() if pages is None else populating(pages):
            for window, blocks in arriving if limit else ():
                miss, before = blocks.miss, done
                if miss == "timeout" and loading is not None:
                    miss = ""  # of one step; there may be another
                for link, lease in zip(window, blocks.leases, strict=False):
                    block_kv, block_ids = self._geometry.read(lease.view, link.tokens)
                    parent = block_id(self.namespace.id, parent, block_ids)
                    if parent != link.prefix_id:
                        miss = "corrupt"  # its tokens are not those that its name stands for
                        break
                    ids = block_ids[: limit - done]
                    common = ids.size if prompt is None else common_prefix(ids, prompt[done:])
                    room.write(done, block_kv[:, :, :common])
                    tokens[done : done + common] = ids[:common]
                    done += common
                if not blocks.intact:
                    done, miss = before, "unavailable"  # the node died while this was copied
                if miss or done == limit:
                    break
        if loading is not None and done < limit:
            miss = miss or loading.miss
        cache = self._geometry.cache(self._model, room.kv[:, :, :done])
        return Restored(past_key_values=cache, tokens=tokens[:done], miss=miss, **about)

    # --- commit ---

    def commit(
        self,
        session_id: str,
        input_ids: Any,
        past_key_values: DynamicCache,
        *,
        durability: api.Durability | None = None,
        exact: bool = True,
        base_version: int | None = None,
        ttl_s: int | None = None,
        labels: dict[str, str] | None = None,
    ) -> api.Receipt:
        """Store a session's KV after a turn: publish the blocks that are not stored yet, then make all of them the next version.

        Args:
            session_id: The session; it is created where it does not exist.
            input_ids: Prompt and answer, [n] or [1, n]. After `generate` that is one token more than the cache holds: the last
                one was never computed, and is not stored.
            past_key_values: The cache, which holds the KV of the first of these tokens.
            durability: What the receipt promises; the node's default where None.
            exact: Whether a last block that is not full is stored as well, so that the session resumes at its last token.
            base_version: The version this one continues; by default the one that was last restored or committed here, 0 if none.
            ttl_s: As the API's `Commit`.
            labels: As the API's `Commit`.

        Raises:
            Conflict: The session has moved on, and nothing was changed: restore it again, or fork. With `durability` of `dram` or
                `nvme` only this node's commits are looked at: where another node's is first in the bucket, this one is dropped.
            Gone: It is no more, and its id may mean another one by now: restore, which starts anew.
            Overloaded: The node took not even the first block.
            Invalid: The cache is not of these tokens, or holds none to store.
        """
        held = self._geometry.check(past_key_values)
        tokens = self._ids(input_ids)
        if tokens.size < held:
            raise Invalid(f"past_key_values holds {held} tokens, and input_ids only {tokens.size}: pass prompt and answer")
        links = chain(self.namespace, tokens[:held], partial=exact)
        if not links:
            raise Invalid(f"past_key_values holds {held} tokens, and a full block has {self.namespace.block_tokens}")
        taken = self._publish(links, tokens, past_key_values)
        if not taken:
            raise Overloaded("the node took none of the blocks: it is under load")
        base, branch = self._bases.get(session_id, (0, "")) if base_version is None else (base_version, None)
        settings: dict[str, Any] = {
            "namespace": self.namespace,
            "base_version": base,
            "branch": branch,
            "blocks": links[:taken],
            "shards": (self._shard,),
            "ttl_s": ttl_s,
            "labels": labels or {},
            "durability": durability,
            "write_id": RandomIds().new(),
        }
        try:
            receipt = self._kv.commit(session_id, **settings)
        except Unavailable as error:
            if error.kind not in _ASKED_AGAIN:
                raise
            time.sleep(_ASKED_AGAIN[error.kind])
            receipt = self._kv.commit(session_id, **settings)  # it may have landed: then this, by its write id, is the same commit
        self._remember(session_id, receipt)
        return receipt if taken == len(links) else msgspec.structs.replace(receipt, cut=True)

    def _publish(self, links: Sequence[Link], tokens: np.ndarray, cache: DynamicCache) -> int:
        """Hand the node what is not stored. Returns how many leading blocks are stored, or were taken."""
        size = self.namespace.block_tokens
        missing = list(range(self._stored(links).run, len(links)))
        copy_out = self._geometry.leaving(cache)

        def fill(index: int, payload: memoryview) -> None:
            at = missing[index]
            kv, ids = self._geometry.payload(payload, links[at].tokens)
            copy_out(at * size, kv)
            ids[:] = tokens[at * size : at * size + ids.size]

        for pause in (*_PUT_PAUSES, None):
            if not missing:
                return len(links)
            taken = self._kv.put(self.namespace, self._shard, [links[at] for at in missing], fill)
            missing = [at for at, good in zip(missing, taken, strict=True) if not good]
            if missing and pause:
                time.sleep(pause)
        return missing[0] if missing else len(links)

    # --- forks, and the way back ---

    def fork(self, session_id: str, as_: str, *, version: int = 0) -> api.Session:
        """A second session that begins as this one's version (0: the current one); no KV moves."""
        session = self._kv.fork(session_id, namespace=self.namespace, as_=as_, version=version)
        self._remember(as_, session)
        return session

    def rewind(self, session_id: str, *, version: int | None = None, tokens: int | None = None) -> api.Session:
        """Back to an earlier version, or to fewer tokens (floored to a block boundary); the answer says how many it now has."""
        session = self._kv.rewind(session_id, namespace=self.namespace, version=version, tokens=tokens)
        self._remember(session_id, session)
        return session

    # --- parts ---

    def _ids(self, input_ids: Any) -> np.ndarray:
        return as_tokens(self._torch.as_ids(input_ids))

    def _stored(self, links: Sequence[Link], reach: api.Tier = "bucket") -> api.Found:
        """The leading run of blocks that are somewhere, no farther than `reach`."""
        if not links:
            return api.Found(run=0, tiers=[])
        names = [link.prefix_id for link in links]
        return self._kv.lookup(namespace=self.namespace, prefix_ids=names, shards=(self._shard,), reach=reach)

    def _remember(self, session_id: str, found: api.Session | api.SessionManifest | api.Receipt) -> None:
        self._bases[session_id] = (found.version, found.branch)
        self._bases.move_to_end(session_id)
        if len(self._bases) > MAX_REMEMBERED:
            self._bases.popitem(last=False)


def _in_memory(found: api.Found) -> int:
    """How many leading blocks are in the node's memory."""
    return next((index for index, tier in enumerate(found.tiers) if tier != "dram"), found.run)


def crop(cache: DynamicCache, tokens: int) -> None:
    """Keep the first `tokens` tokens of a cache; see `hf_cache.crop`."""
    importlib.import_module("kvstore.connectors.hf_cache").crop(cache, tokens)
