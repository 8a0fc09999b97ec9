"""The half beside vLLM's scheduler: what is stored of a prompt, what is to be loaded and saved, and when blocks may be reused.

Nothing here waits, and nothing here raises into the engine: a question that is not answered yet is asked again at the next step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final

import msgspec

from kvstore import api
from kvstore.connectors.base import usable
from kvstore.connectors.bridge import Bridge
from kvstore.connectors.sessions import Sessions, Turn
from kvstore.connectors.transfers import SOON_S, Look
from kvstore.connectors.vllm_messages import NOWHERE, Load, Report, Save, Step, packed
from kvstore.connectors.vllm_names import Model, Settings
from kvstore.connectors.vllm_requests import Chain, usable_by, who
from kvstore.ids import as_tokens

HOLD_S: Final = 10.0  # a finished request's blocks are kept from the engine no longer, whatever the saves do
NAMED: Final = 16_384  # tokens of a prompt that are named in one step: a long one's take ten milliseconds
CLOSE_S: Final = 5.0  # for the last commits, when the engine shuts down

log = logging.getLogger(__name__)


class News(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a request are stored, or turned out to be gone.

    Attributes:
        request: vLLM's.
        start: First token.
        end: Behind the last one.
        session: Of the request, or "".
        gone: Which of the two.
    """

    request: Any
    start: int
    end: int
    session: str = ""
    gone: bool = False


class Tracked:
    """A request, from when it is first asked about until nothing of it is under way."""

    def __init__(self, model: Model, request: Any, turn: Turn | None) -> None:
        self.request = request
        self.turn = turn
        self.chain = Chain(model.namespace, request)
        self.look: Look | None = None
        self.found: api.Found | None = None
        self.local = 0  # tokens in the engine's own cache, when last asked
        self.life = 0  # num_preemptions: it begins anew after each
        self.tried = False  # to load something, in this life
        self.loading = False
        self.pages: list[list[int]] = [[] for _ in model.groups]
        self.offered = 0  # blocks for which a save was ordered, or that were stored before
        self.stored = 0  # leading blocks that are stored, of every shard
        self.jobs: dict[int, Job] = {}
        self.over = False
        self.kept_since: float | None = None  # it is over, and its blocks are still held
        self.receipt: Future[api.Receipt] | None = None


class Job:
    """An order to save, until every worker is done with it."""

    def __init__(self, owner: Tracked, first: int, count: int, pages: frozenset[int]) -> None:
        self.owner, self.first, self.count, self.pages = owner, first, count, pages
        self.run = count
        self.answers = 0


class SchedulerHalf:
    """What the scheduler of one engine asks.

    Args:
        model: The engine's KV.
        settings: What the user wants saved.
        bridge: The way to the tier.
        workers: How many there are: a block is stored when each has said so.
        tells: Whether anybody takes the news.
    """

    def __init__(self, model: Model, settings: Settings, bridge: Bridge, workers: int, *, tells: bool = False) -> None:
        self._model, self._settings, self._bridge, self._workers = model, settings, bridge, workers
        self._shards = model.shards
        self._sessions = Sessions(bridge, model.namespace, self._shards)
        self._tracked: dict[str, Tracked] = {}
        self._jobs: dict[int, Job] = {}
        self._being_saved: dict[int, set[int]] = {}  # the engine's blocks, and the orders that read them
        self._job = 0
        self._loads: list[Load] = []
        self._written: list[int] = []
        self._cancel: list[str] = []
        self._waiting: list[str] = []
        self._patience = SOON_S
        self._stopped = False
        self._tells = tells
        self._news: list[News] = []

    # --- asked for each request that waits ---

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond the `computed` ones can be loaded; None while that is not known."""
        if self._stopped or not usable_by(request):
            return 0, False
        try:
            return self._matched(self._track(request), computed)
        except Exception:  # whatever is wrong with it, the engine can compute it
            log.exception("kvtier: request %s goes on without", request.request_id)
            self._forget(request.request_id)
            return 0, False

    def _matched(self, tracked: Tracked, computed: int) -> tuple[int | None, bool]:
        request = tracked.request
        if tracked.life != request.num_preemptions:
            tracked.life, tracked.tried, tracked.look = request.num_preemptions, False, None
        if tracked.tried:  # it was loaded, and something was missing: compute it
            return 0, False
        tracked.local = computed
        size = self._model.namespace.block_tokens
        most = usable(request.num_tokens, request.num_tokens) // size
        links = tracked.chain.upto(min(most * size, len(tracked.chain.links) * size + max(NAMED, size)))
        if len(links) < most:
            return None, False
        if len(links) * size <= computed:
            return 0, False
        if tracked.look is None:
            tracked.look = self._bridge.look(self._model.namespace, self._shards, links)
        began = time.monotonic()
        tracked.found = tracked.look.poll(max(0.0, self._patience))
        self._patience -= time.monotonic() - began
        if tracked.found is None:
            return None, False
        tracked.stored = max(tracked.stored, tracked.found.run)
        more = max(0, min(tracked.found.run, len(links)) * size - computed)
        return more, more > 0

    def allocated(self, request: Any, pages: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine has room for the `tokens` that are to be loaded."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tokens <= 0 or tracked.found is None:
            return
        size = self._model.namespace.block_tokens
        first, end = tracked.local // size, (tracked.local + tokens) // size
        wanted = tuple(self._wanted(tracked.local, group, pages[group], first, end) for group in self._model.groups)
        self._written += [page for group in wanted for page in group if page != NOWHERE]
        near = sum(tier == "dram" for tier in tracked.found.tiers[first:end])
        links = tracked.chain.links[first:end]
        self._loads.append(Load(request.request_id, packed(links), size, wanted, near))
        tracked.tried = tracked.loading = True

    def _wanted(self, local: int, group: int, pages: Sequence[int], first: int, end: int) -> tuple[int, ...]:
        """The engine's blocks of [first, end), without those that it has already, or does not want (behind a window)."""
        each, tokens = self._model.pages[group], self._model.page_tokens[group]
        return tuple(
            pages[index] if (index + 1) * tokens > local and pages[index] else NOWHERE for index in range(first * each, end * each)
        )

    # --- asked once a step ---

    def step(self, output: Any) -> Step:
        """What the workers shall do in the step that has been scheduled."""
        written, self._written = self._written, []
        scheduled = list(self._scheduled(output, written))
        halt = {job for page in written for job in self._being_saved.get(page, ())}
        halt |= self._overdue()
        saves = [save for each in scheduled if (save := self._saving(*each)) is not None]
        step = Step(
            tuple(self._loads),
            tuple(saves),
            tuple(sorted(halt)),
            tuple(self._cancel),
            tuple(self._waiting),
            not output.num_scheduled_tokens,
        )
        self._loads, self._cancel, self._waiting = [], [], []
        self._patience = SOON_S
        return step

    def _scheduled(self, output: Any, written: list[int]) -> Iterable[tuple[Tracked, int, int]]:
        """Each request of a step, how many tokens it has in the cache, and how many come; `written` gets what is written anew."""
        for new in output.scheduled_new_reqs:
            self._take_pages(new.req_id, new.block_ids, new.num_computed_tokens, written, anew=True)
            if new.req_id in self._tracked:
                yield self._tracked[new.req_id], new.num_computed_tokens, output.num_scheduled_tokens[new.req_id]
        cached = output.scheduled_cached_reqs
        for request, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            anew = request in cached.resumed_req_ids
            if blocks is not None:
                self._take_pages(request, blocks, computed, written, anew=anew)
            if request in self._tracked:
                tracked = self._tracked[request]
                if anew:
                    tracked.offered = tracked.stored  # what was halted is offered again; what is there is not copied again
                yield tracked, computed, output.num_scheduled_tokens[request]

    def _take_pages(self, request: str, blocks: Sequence[Sequence[int]], computed: int, written: list[int], *, anew: bool) -> None:
        tracked = self._tracked.get(request)
        for group in self._model.groups:
            pages = list(blocks[group])
            written += (pages[computed // self._model.page_tokens[group] :]) if anew else pages
            if tracked is not None and anew:
                tracked.pages[group] = pages
            elif tracked is not None:
                tracked.pages[group] += pages

    def _saving(self, tracked: Tracked, computed: int, scheduled: int) -> Save | None:
        try:
            return self._save(tracked, computed, scheduled)
        except Exception:
            log.exception("kvtier: request %s is not saved", tracked.request.request_id)
            self._forget(tracked.request.request_id)
            return None

    def _save(self, tracked: Tracked, computed: int, scheduled: int) -> Save | None:
        """The blocks that are full after this step, and were not offered yet."""
        if self._stopped or not self._wants(tracked):
            return None
        request, size = tracked.request, self._model.namespace.block_tokens
        most = request.num_tokens if self._settings.decode else request.num_prompt_tokens
        links = tracked.chain.upto(min(computed + scheduled, most))
        first, end = max(tracked.offered, tracked.stored), len(links)
        if first >= end:
            return None
        tracked.offered = end
        pages = tuple(
            self._kept(tracked, group, computed)[first * each : end * each] for group, each in enumerate(self._model.pages)
        )
        end = first + min(self._whole(group, part) for group, part in enumerate(pages))
        if first >= end:  # a window has moved on before the block was full
            return None
        pages = tuple(part[: (end - first) * each] for part, each in zip(pages, self._model.pages, strict=True))
        self._job += 1
        job = Job(tracked, first, end - first, frozenset(page for part in pages for page in part))
        self._jobs[self._job] = tracked.jobs[self._job] = job
        for page in job.pages:
            self._being_saved.setdefault(page, set()).add(self._job)
        ids = as_tokens(request.all_token_ids[first * size : end * size]).tobytes()
        return Save(self._job, request.request_id, packed(links[first:end]), ids, pages)

    def _kept(self, tracked: Tracked, group: int, computed: int) -> tuple[int, ...]:
        """A request's blocks in the engine; 0 for those that it may have given away, because a window has moved on."""
        pages, kind = tracked.pages[group], self._model.namespace.groups[group]
        gone = max(0, computed - kind.window + 1) // self._model.page_tokens[group] if kind.kind == "window" else 0
        return (*([0] * min(gone, len(pages))), *pages[gone:])

    def _whole(self, group: int, pages: Sequence[int]) -> int:
        """How many leading blocks have all of their pages."""
        each = self._model.pages[group]
        return (pages.index(0) if 0 in pages else len(pages)) // each

    def _wants(self, tracked: Tracked) -> bool:
        settings = self._settings
        if getattr(tracked.request, "prompt_embeds", None) is not None:
            return False
        return tracked.request.num_prompt_tokens >= settings.min_tokens and (settings.save == "all" or tracked.turn is not None)

    def _prompt_blocks(self, request: Any) -> int:
        return int(request.num_prompt_tokens) // self._model.namespace.block_tokens

    def _overdue(self) -> set[int]:
        now = time.monotonic()
        kept = [each for each in self._tracked.values() if each.kept_since is not None and now - each.kept_since > HOLD_S]
        return {job for tracked in kept for job in tracked.jobs}

    # --- told ---

    def reported(self, report: Report | None, received: Iterable[str]) -> None:
        """What the workers say after a step."""
        for request in received:
            if request in self._tracked:
                self._tracked[request].loading = False
        if report is None:
            return
        for request, runs in report.lost.items():
            if request in self._tracked:
                tracked = self._tracked[request]
                there = tracked.local // self._model.namespace.block_tokens + min(runs)
                self._tell(tracked, there, tracked.stored, gone=True)
                tracked.stored = tracked.offered = min(tracked.stored, there)
        for number, runs in report.saved.items():
            job = self._jobs.get(number)
            if job is not None:
                job.run = min(job.run, *runs)
                job.answers += len(runs)
                if job.answers >= self._workers:
                    self._done(number, job)

    def _done(self, number: int, job: Job) -> None:
        del self._jobs[number]
        for page in job.pages:
            self._being_saved[page].discard(number)
            if not self._being_saved[page]:
                del self._being_saved[page]
        tracked = job.owner
        tracked.jobs.pop(number, None)
        self._tell(tracked, job.first, job.first + job.run)
        if job.first <= tracked.stored:
            tracked.stored = max(tracked.stored, job.first + job.run)
        if tracked.over and not tracked.jobs:
            self._end(tracked)
        elif tracked.turn is not None and tracked.receipt is None and tracked.stored >= self._prompt_blocks(tracked.request):
            tracked.receipt = self._sessions.so_far(tracked.turn, tracked.chain.links[: tracked.stored])

    def _tell(self, tracked: Tracked, first: int, end: int, *, gone: bool = False) -> None:
        if self._tells and first < end:
            size, session = self._model.namespace.block_tokens, tracked.turn.who.session if tracked.turn is not None else ""
            self._news.append(News(tracked.request, first * size, end * size, session, gone))

    def take_news(self) -> list[News]:
        """What became known since this was last asked."""
        news, self._news = self._news, []
        return news

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request is over, for whatever reason: whether its blocks are still needed, and what to tell whoever sent it."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return False, None
        tracked.over, told = True, self._told(tracked)
        if not any(tracked.pages):  # it never ran: its session stays as it was
            self._forget(request.request_id)
        elif not tracked.jobs:
            self._end(tracked)
        if tracked.loading:  # the engine keeps the blocks by itself, until the workers say that it was received
            self._cancel.append(request.request_id)
            return False, told
        if tracked.jobs:
            tracked.kept_since = time.monotonic()
            self._waiting.append(request.request_id)
        return bool(tracked.jobs), told

    def _told(self, tracked: Tracked) -> dict[str, Any] | None:
        """What is acknowledged by now: no more is promised."""
        if tracked.turn is None:
            return None
        size, receipt = self._model.namespace.block_tokens, tracked.receipt
        told: dict[str, Any] = {"session": tracked.turn.who.session, "tokens_saved": tracked.stored * size, "version": None}
        if receipt is not None and receipt.done() and not receipt.cancelled() and receipt.exception() is None:
            said = receipt.result()
            told |= {"version": said.version, "lane": said.lane, "tokens": said.tokens, "durability": said.durability}
        return {"kvtier": told}

    def _end(self, tracked: Tracked) -> Future[api.Receipt] | None:
        self._tracked.pop(tracked.request.request_id, None)
        if tracked.turn is None:
            return None
        return self._sessions.end(tracked.turn, tracked.chain.links[: tracked.stored])

    def _forget(self, request: str) -> None:
        tracked = self._tracked.pop(request, None)
        if tracked is not None and tracked.turn is not None:
            self._sessions.drop(tracked.turn)

    def stop(self) -> None:
        """The weights may have changed under their name: nothing is looked for, or saved, any more."""
        if not self._stopped:
            log.warning("kvtier: the engine was told to forget what connectors hold: it goes on without, until it is started anew")
        self._stopped = True

    def close(self) -> None:
        """The engine shuts down, and its workers have: what was saved of requests that are over is committed."""
        ends = time.monotonic() + CLOSE_S
        for tracked in list(self._tracked.values()):
            if not tracked.over or tracked.turn is None or time.monotonic() >= ends:  # a node that says nothing, of many
                self._forget(tracked.request.request_id)
                continue
            look = self._bridge.look(self._model.namespace, self._shards, tracked.chain.links[: tracked.offered])
            while (found := look.poll()) is None:
                pass  # it ends by itself
            tracked.stored = found.run
            self._end(tracked)
        last = self._bridge.call("close", lambda _: None)  # behind every commit, those of requests that ended before included
        if last is not None:
            wait([last], max(0.0, ends - time.monotonic()))

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            mine = who(request)
            turn = None if mine is None else self._sessions.begin(mine)
            tracked = self._tracked[request.request_id] = Tracked(self._model, request, turn)
        return tracked
