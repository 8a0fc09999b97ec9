"""One restore at work: steps in prefix order, each in its turn, and holds on what it brought in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Final

import msgspec

from kvstore import api
from kvstore.clock import Clock
from kvstore.config import PrestageSettings
from kvstore.lifecycle.prestage import Rates, Ticket
from kvstore.service.plane import Plane
from kvstore.service.staging import Plan, Step, whole_rows
from tiering import Lease, Miss

Report = Callable[..., None]
_NO_BOUND: Final = 1 << 62


class End(msgspec.Struct, frozen=True):
    """Why a restore stopped before its end; "" where it did not.

    Attributes:
        cut: Its deadline passed.
        crowded: It is speculative, and there was no time or no room for it.
    """

    why: str = ""
    cut: bool = False
    crowded: bool = False


class Stager:
    """What every restore of a node shares."""

    def __init__(self, plane: Plane, clock: Clock, rates: Rates, settings: PrestageSettings) -> None:
        self.plane, self.clock, self.rates, self.settings = plane, clock, rates, settings

    async def stage(self, plan: Plan, owner: Hashable, tenant: str, request: api.Restore, ticket: Ticket, report: Report) -> End:
        """Bring a plan's blocks in. What is staged is held when this returns; when it is cancelled, nothing is.

        Args:
            plan: The blocks.
            owner: Of the holds.
            tenant: Whose memory.
            request: The target tier, the byte budget, the time to hold.
            ticket: Its place; its deadline bounds the work.
            report: Takes the fields of the status that changed.
        """
        staging = _Staging(self, plan, owner, tenant, request, ticket, report)
        try:
            end = await staging.run()
            staging.finish()
        except BaseException:
            staging.give_up()
            raise
        finally:
            staging.release()
        return end


class _Staging:
    """The state of one of them."""

    def __init__(
        self, stager: Stager, plan: Plan, owner: Hashable, tenant: str, request: api.Restore, ticket: Ticket, report: Report
    ) -> None:
        self._plan, self._owner, self._request, self._ticket, self._report = plan, owner, request, ticket, report
        self._turns, self._clock, self._rates, self._settings = stager.plane.turns, stager.clock, stager.rates, stager.settings
        self._stack = stager.plane.tiers(tenant).stack
        self._hold_s = float(stager.settings.hold) if request.hold_ms is None else request.hold_ms / 1000
        self._leases: list[Lease] = []  # of an interactive restore, until its end: it must not evict its own beginning
        self._staged: list[tuple[int, int, list[bytes]]] = []  # tokens, bytes and keys of each block
        self._by_tier: Counter[str] = Counter()
        self._tokens = self._bytes = 0
        self._begun = self._clock.monotonic()

    async def run(self) -> End:
        """Step by step, until something ends it."""
        plan, count = self._plan, len(self._plan.blocks)
        end = plan.within(self._request.max_bytes) if self._request.max_bytes else count
        stop, step = End(), None
        while not stop.why and (first := len(self._staged)) < end:
            try:
                async with self._turns.turn(self._ticket, self._left()):
                    step = step or plan.step(first, end, self._most())
                    if self._ticket.lane == "near" and not self._is_near(step):
                        self._ticket.far = True
                        continue
                    stop, step = await self._step(step), None
            except TimeoutError:
                stop = End("the deadline passed while it waited for its turn", cut=True, crowded=self._ticket.speculative)
        kept, staged = self._still_there(), len(self._staged)
        if kept < staged:
            stop = End("it made way for requests", crowded=True)
        if stop.why:
            return msgspec.structs.replace(stop, why=f"block {kept} of {count}: {stop.why}")
        return End(f"max_bytes leaves out {count - end} of {count} blocks" if end < count else "")

    def finish(self) -> None:
        """It ended: hold what is staged, for the time that was asked."""
        if not self._hold_s:
            self.give_up()
        elif self._staged and self._request.tier == "dram":
            self._stack.dram.hold(self._owner, [], seconds=self._hold_s, yielding=self._ticket.speculative)

    def give_up(self) -> None:
        """It was cancelled, or failed: what is staged stays, and may go."""
        if self._request.tier == "dram":
            self._stack.dram.let_go(self._owner)

    def release(self) -> None:
        """Nothing stays leased."""
        for lease in self._leases:
            lease.release()
        self._leases.clear()

    def _left(self) -> float:
        return max(0.0, self._ticket.deadline - self._clock.monotonic())

    def _most(self) -> int:
        return int(self._settings.inflight) if self._ticket.speculative else _NO_BOUND

    def _is_near(self, step: Step) -> bool:
        return None not in self._stack.locate([want.key for want in step.wants])

    async def _step(self, step: Step) -> End:
        speculative, began = self._ticket.speculative, self._clock.monotonic()
        before = [key for _, _, keys in self._staged[-2:] for key in keys]  # tells enough: this is no beginning
        answers = await self._stack.get_many(step.wants, deadline=self._ticket.deadline, ahead=speculative, after=before)
        leases = [answer for answer in answers if isinstance(answer, Lease)]
        self._leases += leases
        whole, miss = whole_rows(step.rows, answers)
        came = leases[: whole * len(step.rows[0])]
        self._measure(leases, self._clock.monotonic() - began)
        stop = End()
        if miss is not None:
            stop = End(miss.value, cut=miss is Miss.TIMEOUT, crowded=speculative and miss in {Miss.TIMEOUT, Miss.FULL})
        if self._request.tier == "nvme":
            whole, stop = await self._to_disk(step, leases, whole, stop)
        else:
            whole, stop = self._hold(step, whole, stop)
        self._progress(step, whole, came[: whole * len(step.rows[0])])
        if speculative or self._request.tier == "nvme":
            self.release()
        return stop

    async def _to_disk(self, step: Step, leases: list[Lease], whole: int, stop: End) -> tuple[int, End]:
        """Make the rows durable there; what they took in memory on the way is the first to go again."""
        if whole:
            kept = await self._stack.flush([want for row in step.rows[:whole] for want in row], deadline=self._ticket.deadline)
            if not all(kept):
                whole, stop = kept.index(False) // len(step.rows[0]), End("the disk tier did not take every block")
        brought = [lease.key for lease in leases if lease.source != self._stack.dram.name]
        self.release()
        self._stack.dram.demote(brought)
        return whole, stop

    def _hold(self, step: Step, whole: int, stop: End) -> tuple[int, End]:
        keys = [want.key for row in step.rows[:whole] for want in row]
        seconds = self._left() + self._hold_s
        held = self._stack.dram.hold(self._owner, keys, seconds=seconds, yielding=self._ticket.speculative)
        if held == len(keys) or not self._ticket.speculative:
            return whole, stop  # an interactive restore is a use: what is not held ranks as used just now
        return held // len(step.rows[0]), End("no more may be held ahead of its use (prestage.held)", crowded=True)

    def _measure(self, leases: list[Lease], seconds: float) -> None:
        """What a step with bytes of the bucket took, the bucket took; else the disk."""
        by_source: Counter[str] = Counter()
        for lease in leases:
            by_source[lease.source] += lease.size
        for source in ("bucket", "nvme"):
            if by_source[source]:
                self._rates.observe(source, by_source[source], seconds)
                return

    def _progress(self, step: Step, whole: int, leases: list[Lease]) -> None:
        for link, row in zip(step.links[:whole], step.rows[:whole], strict=True):
            size = sum(want.size for want in row)
            self._staged.append((link.tokens, size, [want.key for want in row]))
            self._tokens += link.tokens
            self._bytes += size
        for lease in leases:
            self._by_tier[lease.source] += lease.size
        rate = self._bytes / max(1e-9, self._clock.monotonic() - self._begun)
        eta = (self._plan.size - self._bytes) / rate * 1000 if rate else None
        self._report(staged_tokens=self._tokens, staged_bytes=self._bytes, by_tier=dict(self._by_tier), eta_ms=eta)

    def _still_there(self) -> int:
        """A speculative restore leases nothing while it works: how many blocks it can still promise."""
        if not self._ticket.speculative or self._request.tier == "nvme":
            return len(self._staged)
        dram = self._stack.dram
        kept = next((n for n, (_, _, keys) in enumerate(self._staged) if not all(dram.contains_many(keys))), len(self._staged))
        for tokens, size, _ in self._staged[kept:]:
            self._tokens -= tokens
            self._bytes -= size
        self._report(staged_tokens=self._tokens, staged_bytes=self._bytes)
        return kept
