"""Sessions for Hugging Face models: `past_key_values` that outlive the process that computed them.

::

    with kvstore.open_sync("kvtier+unix:///run/kvtier/node.sock") as kv:
        sessions = SessionCache(model, kv)
        past = sessions.restore("chat-42", input_ids)           # what is stored of this prompt; nothing on the first turn
        output = model.generate(input_ids, **past.cache, max_new_tokens=64)
        sessions.commit("chat-42", output, past.past_key_values)

Full and sliding-window attention, one sequence or a batch, a `DynamicCache` or a `StaticCache`. torch is imported by the first
`SessionCache`, not by this module.

`past.cache` is `{"cache": past.past_key_values}` from transformers 5.24 on, where `generate` warns of the name `past_key_values`,
and `{"past_key_values": ...}` before.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from kvstore import api
from kvstore.client.choice import Choice
from kvstore.clock import RandomIds
from kvstore.connectors import hf_batch
from kvstore.connectors.base import model_namespace, usable
from kvstore.connectors.hf_choosing import Choosing
from kvstore.connectors.hf_deliver import Arrived, complete
from kvstore.connectors.hf_reading import Bases, Reader, nothing
from kvstore.connectors.hf_restored import Restored, RestoredBatch, Row
from kvstore.connectors.hf_store import Store
from kvstore.errors import Invalid, KVTierError, Overloaded, Unavailable, Unsupported
from kvstore.ids import Shard, as_tokens, chain

if TYPE_CHECKING:
    from transformers import DynamicCache, StaticCache

    from kvstore.client import SyncClient

log = logging.getLogger(__name__)
DEADLINE_MS: Final = 60_000


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
        Unsupported: The model's cache is of a kind that cannot be stored.
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
        torch = importlib.import_module("kvstore.connectors.hf_cache")  # so that importing `hf` imports no torch
        self._as_ids = torch.as_ids
        self._fill = importlib.import_module("kvstore.connectors.hf_fill")
        self._hold = importlib.import_module("kvstore.connectors.hf_held").hold
        self._model, self._kv = model, kv
        self.namespace = model_namespace(
            torch.decoder_config(model),
            revision=revision or torch.weights_digest(model),
            dtype=torch.kv_dtype(model),
            tenant=tenant,
            block_tokens=block_tokens,
            model=model_id,
            lora=torch.adapters(model),
            groups=torch.groups(torch.empty_cache(model)),  # refuses what cannot be stored now, not after the first turn
        )
        self._geometries = [
            torch.Geometry(namespace=self.namespace, shard=Shard(group=group)) for group in range(len(self.namespace.groups))
        ]
        self._store = Store(kv, self._geometries)
        self._bases = Bases()
        self._choosing = Choosing(model, kv, self._geometries[0], compute_or_load) if compute_or_load else None
        self._reader = Reader(kv, model, self._geometries[0], self._store, self._bases, self._choosing)

    # --- restore ---

    def restore(
        self,
        session_id: str,
        input_ids: Any = None,
        *,
        version: int | None = None,
        deadline_ms: int = DEADLINE_MS,
        into: StaticCache | None = None,
    ) -> Restored:
        """The KV of a session, to its exact last token.

        Args:
            session_id: The session.
            input_ids: The whole prompt of the next turn, [n] or [1, n]. Then the cache covers what the session and the prompt
                have in common, and leaves at least one token to compute. A session that does not exist yet shares the blocks of
                others that begin alike. And a store in trouble costs a recomputation, never the request.
            version: An older version; the current one by default.
            deadline_ms: What did not arrive by then is left to be recomputed.
            into: A static cache of the model, which is emptied and filled, instead of a new `DynamicCache`.

        Raises:
            NotFound, Gone: Without `input_ids`: there is no such session.
            Unavailable, Overloaded: Without `input_ids`: the store is out of reach.
            Invalid: `into` has no room for the prompt, or the session.
        """
        prompt = None if input_ids is None else self._ids(input_ids)
        row = self._reader.session(session_id, prompt, version, deadline_ms)
        return self._restored(row, prompt, into, deadline_ms)

    def restore_batch(
        self,
        session_ids: Sequence[str],
        input_ids: Any,
        attention_mask: Any,
        *,
        deadline_ms: int = DEADLINE_MS,
        into: StaticCache | None = None,
    ) -> RestoredBatch:
        """The KV of several sessions, for one `generate`.

        The batch is read from one column on: where the longest new part of a prompt begins. Of rows with a shorter one, a little
        that is stored is computed again.

        Args:
            session_ids: The session of each row.
            input_ids: The prompts of the next turns, [rows, columns], padded on the left.
            attention_mask: Likewise: 0 where there is padding.
            deadline_ms: As in `restore`, for each row.
            into: As in `restore`.

        Raises:
            Invalid: The rows are not padded on the left, or there is no session id for each; `into` has no room for them.
        """
        pads = hf_batch.pads(session_ids, attention_mask)
        prompts = hf_batch.prompts(input_ids, attention_mask, pads)
        cache = self._fill.emptied(self._model, into, len(pads), pads[0] + prompts[0].size)
        asked = zip(session_ids, prompts, strict=True)
        rows = [self._reader.session(session_id, prompt, None, deadline_ms) for session_id, prompt in asked]
        columns, miss = self._filled(cache, rows, pads, deadline_ms, may_fail=False)
        found = []
        for row, pad in zip(rows, pads, strict=True):
            tokens = row.tokens[: max(0, columns - pad)]
            why = row.miss or (miss or "batch" if tokens.size < row.tokens.size else "")
            found.append(Row(tokens=tokens, version=row.version, restore_id=row.restore_id, miss=why))
        return RestoredBatch(past_key_values=cache, rows=tuple(found))

    def reusable(self, input_ids: Any) -> int:
        """How many tokens of a prompt `reuse` would deliver now, whichever sessions they came from. Moves no KV."""
        prompt = self._ids(input_ids)
        try:
            found = self._store.stored(chain(self.namespace, prompt))
            return usable(found.run * self.namespace.block_tokens, prompt.size)
        except (Unavailable, Overloaded) as error:
            log.warning("kvtier: look-up failed, nothing is reused: %s", error)
            return 0

    def reuse(self, input_ids: Any, *, deadline_ms: int = DEADLINE_MS, into: StaticCache | None = None) -> Restored:
        """The KV of the full blocks that a prompt begins with, whichever sessions they came from; it never fails a request."""
        prompt = self._ids(input_ids)
        return self._restored(self._reader.shared(prompt, deadline_ms), prompt, into, deadline_ms)

    def _restored(self, row: Arrived, prompt: np.ndarray | None, into: Any, deadline_ms: int) -> Restored:
        cache = self._fill.emptied(self._model, into, 1, row.tokens.size if prompt is None else prompt.size)
        columns, miss = self._filled(cache, [row], [0], deadline_ms, may_fail=prompt is None)
        return Restored(
            past_key_values=cache,
            tokens=row.tokens[:columns],
            version=row.version,
            restore_id=row.restore_id,
            miss=row.miss or miss,
        )

    def _filled(
        self, cache: Any, rows: Sequence[Arrived], pads: Sequence[int], deadline_ms: int, *, may_fail: bool
    ) -> tuple[int, str]:
        """Fill a cache with what came, completed by the other groups. Returns its columns, and why it has no more."""
        try:
            columns, parts, miss = complete(self._kv, self._model, self._geometries, rows, pads, deadline_ms)
        except (Unavailable, Overloaded) as error:
            if may_fail:
                raise
            return 0, nothing(error).miss
        self._fill.fill(cache, parts, pads, columns)
        return columns, miss

    # --- commit ---

    def commit(
        self,
        session_id: str,
        input_ids: Any,
        past_key_values: DynamicCache | StaticCache,
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

        Returns:
            The receipt. It says `cut` where not all of the tokens were stored: the node took no more, or a sliding-window layer has
            let go of them.

        Raises:
            Conflict: The session has moved on, and nothing was changed: restore it again, or fork. With `durability` of `dram` or
                `nvme` only this node's commits are looked at: where another node's is first in the bucket, this one is dropped.
            Gone: It is no more, and its id may mean another one by now: restore, which starts anew.
            Overloaded: The node took not even the first block.
            Unsupported: A sliding-window layer has let go of the first block, and it is not stored; or it is another kind of cache.
            Invalid: The cache is not of these tokens, or holds none to store.
        """
        held, tokens = self._hold(past_key_values, self.namespace), self._ids(input_ids)
        settings = {"durability": durability, "ttl_s": ttl_s, "labels": labels or {}}
        return self._commit(session_id, tokens, held, exact, base_version, settings)

    def commit_batch(
        self,
        session_ids: Sequence[str],
        output: Any,
        past_key_values: DynamicCache | StaticCache,
        attention_mask: Any,
        *,
        durability: api.Durability | None = None,
        exact: bool = True,
        ttl_s: int | None = None,
        labels: dict[str, str] | None = None,
    ) -> list[api.Receipt | KVTierError]:
        """Store every row of a batch under its own session; padding is never stored.

        Args:
            session_ids: The session of each row.
            output: Prompts and answers, [rows, columns], as `generate` returns them.
            past_key_values: The cache of all rows.
            attention_mask: Of the prompts, as `generate` had it.
            durability: As in `commit`.
            exact: As in `commit`.
            ttl_s: As in `commit`.
            labels: As in `commit`.

        Returns:
            For each row its receipt, or what `commit` would have raised: one row's trouble is not the others'.

        Raises:
            Invalid, Unsupported: As in `restore_batch`, or the cache is not of these rows; nothing was stored.
        """
        pads = hf_batch.pads(session_ids, attention_mask)
        columns = hf_batch.array(attention_mask).shape[1]
        rows = hf_batch.answered(output, columns, pads, self._model.generation_config)
        holding = [
            self._hold(past_key_values, self.namespace, row=row, rows=len(pads), pad=pad, most=tokens.size)
            for row, (pad, tokens) in enumerate(zip(pads, rows, strict=True))
        ]
        settings = {"durability": durability, "ttl_s": ttl_s, "labels": labels or {}}
        found: list[api.Receipt | KVTierError] = []
        for session_id, tokens, held in zip(session_ids, rows, holding, strict=True):
            try:
                found.append(self._commit(session_id, tokens, held, exact, None, settings))
            except KVTierError as error:
                found.append(error)
        return found

    def _commit(
        self, session_id: str, tokens: np.ndarray, held: Any, exact: bool, base_version: int | None, settings: dict[str, Any]
    ) -> api.Receipt:
        if tokens.size < held.tokens:
            raise Invalid(f"past_key_values holds {held.tokens} tokens, and input_ids only {tokens.size}: pass prompt and answer")
        links = chain(self.namespace, tokens[: held.tokens], partial=exact)
        if not links:
            raise Invalid(f"past_key_values holds {held.tokens} tokens, and a full block has {self.namespace.block_tokens}")
        taken, offered = self._store.publish(links, tokens, held)
        if not taken and not offered:
            raise Unsupported(
                f"a sliding-window layer has let go of the first {held.first} tokens, and they are not stored",
                remedy="let generate use the cache that restore returns: it keeps them until they are committed",
            )
        if not taken:
            raise Overloaded("the node took none of the blocks: it is under load")
        base, branch = self._bases.get(session_id) if base_version is None else (base_version, None)
        receipt = self._store.commit(
            session_id, base_version=base, branch=branch, blocks=links[:taken], write_id=RandomIds().new(), **settings
        )
        self._bases.remember(session_id, receipt)
        return receipt if taken == len(links) else msgspec.structs.replace(receipt, cut=True)

    # --- forks, and the way back ---

    def fork(self, session_id: str, as_: str, *, version: int = 0) -> api.Session:
        """A second session that begins as this one's version (0: the current one); no KV moves."""
        session = self._kv.fork(session_id, namespace=self.namespace, as_=as_, version=version)
        self._bases.remember(as_, session)
        return session

    def rewind(self, session_id: str, *, version: int | None = None, tokens: int | None = None) -> api.Session:
        """Back to an earlier version, or to fewer tokens (floored to a block boundary); the answer says how many it now has."""
        session = self._kv.rewind(session_id, namespace=self.namespace, version=version, tokens=tokens)
        self._bases.remember(session_id, session)
        return session

    # --- parts ---

    def _ids(self, input_ids: Any) -> np.ndarray:
        return as_tokens(self._as_ids(input_ids))


def crop(cache: DynamicCache, tokens: int) -> None:
    """Keep the first `tokens` tokens of a cache; see `hf_held.crop`."""
    importlib.import_module("kvstore.connectors.hf_held").crop(cache, tokens)
