"""The half inside a worker of vLLM: copies between the engine's memory and the tier, between steps, on the bridge's threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, Generic, TypeVar

from kvstore import codec
from kvstore.connectors.bridge import Bridge
from kvstore.connectors.transfers import Transfer
from kvstore.connectors.vllm_device import DevicePages
from kvstore.connectors.vllm_layout import HostPages
from kvstore.connectors.vllm_messages import NOWHERE, Load, Report, Save, Step
from kvstore.connectors.vllm_names import Model, Place
from kvstore.errors import Unsupported

M = TypeVar("M", Load, Save)
LOAD_S: Final = 5.0  # what takes longer than this, and a slow store needs for its bytes, is computed
LOAD_BYTES_S: Final = 100e6
IDLE_S: Final = 0.002  # a step in which nothing is computed may take that long
CLOSE_S: Final = 5.0  # for saves to end, when the engine shuts down


class _Moving(Generic[M]):
    """What was ordered, and the transfers that do it: one for each attention group."""

    def __init__(self, order: M, transfers: Sequence[Transfer]) -> None:
        self.order: M = order
        self.transfers = transfers

        self._stopped = False

    @property
    def done(self) -> bool:
        """Whether the engine's memory is not touched any more."""
        return self._stopped or all(transfer.done for transfer in self.transfers)

    @property
    def run(self) -> int:
        """How many leading blocks arrived in every group."""
        runs = (transfer.run if transfer.done else 0 for transfer in self.transfers)
        return min(runs, default=len(self.order.prefixes) // 32)

    def stop(self) -> None:
        self._stopped = True
        for transfer in self.transfers:
            transfer.stop()


class WorkerHalf:
    """What a worker does with the KV of its rank.

    Args:
        model: The engine's KV.
        place: Which worker it is.
        bridge: The way to the tier.
        blocks: How many blocks the engine has.
    """

    def __init__(self, model: Model, place: Place, bridge: Bridge, blocks: int) -> None:
        self._model, self._bridge, self._blocks = model, bridge, blocks
        self._shards = [place.shard(model, group) for group in model.groups]
        self._saves = place.saves(model)
        self._pages: list[HostPages] = []
        self._loading: dict[str, _Moving[Load]] = {}
        self._saving: dict[int, _Moving[Save]] = {}
        self._waiting: set[str] = set()
        self._idle = False
        self._report = Report()
        self._broken_blocks = set[int]()
        self._broken_requests = set[str]()

    def register(self, caches: Mapping[str, Any]) -> None:
        """The engine's memory.

        Raises:
            Unsupported: It is not laid out as the namespace says.
        """
        namespace = self._model.namespace
        for group, names in enumerate(self._model.layer_names):
            missing = [name for name in names if name not in caches]
            if missing:
                raise Unsupported(f"there is no cache of layer {missing[0]}")
            plan = codec.layout(namespace, self._shards[group], namespace.block_tokens)
            if len(plan.layers) != len(names):
                raise Unsupported(
                    f"this pipeline stage has {len(names)} layers, and {len(plan.layers)} were expected",
                    remedy="VLLM_PP_LAYER_PARTITION with equal parts",
                )
            tensors = [caches[name] for name in names]
            kind = HostPages if tensors[0].device.type == "cpu" else DevicePages
            self._pages.append(kind(plan, tensors, namespace, self._blocks, self._model.pages[group]))

    def before(self, step: Step) -> None:
        """Before anything is overwritten: what reads or writes blocks that are somebody else's now ends."""
        for job in step.halt:
            if job in self._saving:
                self._saving[job].stop()
        for request in step.cancel:
            if request in self._loading:
                self._loading[request].stop()

    def begin_loads(self, step: Step) -> None:
        """Bring blocks in."""
        for load in step.loads:
            links = load.links
            transfers = [
                self._bridge.load(
                    self._model.namespace,
                    self._shards[group],
                    links,
                    self._placing(group, load),
                    near=load.near,
                    deadline_s=LOAD_S + len(links) * self._pages[group].nbytes / LOAD_BYTES_S,
                )
                for group in self._model.groups
            ]
            self._loading[load.request] = _Moving(load, transfers)

    def begin_saves(self, step: Step) -> None:
        """Take blocks out, which the forward pass has filled."""
        self._idle = step.idle
        self._waiting.update(step.waiting)
        for save in step.saves:
            links = save.links
            transfers = [
                self._bridge.save(self._model.namespace, self._shards[group], links, self._filling(group, save))
                for group in self._model.groups
                if self._saves
            ]
            self._saving[save.job] = _Moving(save, transfers)

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests of which everything is saved, of those that wait for it; and requests whose load has ended, well or not."""
        if self._idle:
            self._leave_time()
        for job in [job for job, saving in self._saving.items() if saving.done]:
            self._report = self._report.with_(Report(saved={job: (self._saving.pop(job).run,)}))
        busy = {saving.order.request for saving in self._saving.values()}
        sent = self._waiting - busy
        self._waiting -= sent
        received = {request for request, loading in self._loading.items() if loading.done}
        for request in received:
            self._received(self._loading.pop(request))
        return sent, received

    def _leave_time(self) -> None:
        """An engine that has nothing to compute asks again and again, and keeps Python from the threads that it waits for."""
        loads = (transfer for loading in self._loading.values() if not loading.done for transfer in loading.transfers)
        saves = (transfer for saving in self._saving.values() if not saving.done for transfer in saving.transfers)
        moving = next(chain(loads, saves), None)
        if moving is not None:
            moving.wait(IDLE_S)

    def _received(self, loading: _Moving[Load]) -> None:
        load, run = loading.order, loading.run
        if run == len(load.prefixes) // 32:
            return
        self._report = self._report.with_(Report(lost={load.request: (run,)}))
        self._broken_requests.add(load.request)
        for pages, each in zip(load.pages, self._model.pages, strict=True):
            self._broken_blocks.update(page for page in pages[run * each :] if page != NOWHERE)

    def take_broken_blocks(self) -> set[int]:
        """The engine's blocks that were not loaded, since this was last asked: what is in them is not what it should be."""
        broken, self._broken_blocks = self._broken_blocks, set()
        return broken

    def take_broken_requests(self) -> set[str]:
        """Requests whose load was short, since this was last asked."""
        broken, self._broken_requests = self._broken_requests, set()
        return broken

    def take_report(self) -> Report | None:
        """What to tell the scheduler's half."""
        report, self._report = self._report, Report()
        return report if report.saved or report.lost else None

    def close(self) -> None:
        """What is being saved has a little time to end. No byte of the engine's memory is touched after this."""
        ends = time.monotonic() + CLOSE_S
        for saving in self._saving.values():
            for transfer in saving.transfers:
                transfer.wait(max(0.0, ends - time.monotonic()))
        for loading in self._loading.values():
            loading.stop()
        for saving in self._saving.values():
            saving.stop()
        self._loading.clear()
        self._saving.clear()

    def _placing(self, group: int, load: Load) -> Callable[[int, memoryview], None]:
        pages, each, wanted = self._pages[group], self._model.pages[group], load.pages[group]
        mark = pages.mark()  # what the engine still does with these blocks, and has begun, comes first
        return lambda index, raw: pages.write(wanted[index * each : (index + 1) * each], raw, mark)

    def _filling(self, group: int, save: Save) -> Callable[[int, memoryview], None]:
        pages, each, filled, tokens = self._pages[group], self._model.pages[group], save.pages[group], save.tokens
        mark = pages.mark()  # the pass that fills them
        return lambda index, payload: pages.read(filled[index * each : (index + 1) * each], tokens[index], payload, mark)
