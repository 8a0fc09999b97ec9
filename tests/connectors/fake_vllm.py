"""What vLLM's scheduler and workers do with a connector, in short: pages, steps, preemption; KV that follows from the tokens."""

import time
from collections import Counter
from types import SimpleNamespace
from zlib import crc32

import numpy as np

from kvstore.connectors.vllm_names import Place, Settings, model_of
from kvstore.connectors.vllm_scheduler import SchedulerHalf
from kvstore.connectors.vllm_worker import WorkerHalf

PAGE = 4  # tokens
NO_MODE = SimpleNamespace(name="NONE")


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def spec(torch, kind=FullAttentionSpec, heads=2, dim=4, dtype="bfloat16", page=PAGE, **more):
    mla = kind is MLAAttentionSpec
    fields = {
        "block_size": page,
        "num_kv_heads": 1 if mla else heads,
        "head_size": dim,
        "head_size_v": 0 if mla else dim,
        "dtype": getattr(torch, dtype),
        "kv_quant_mode": NO_MODE,
        "state_content_bytes": None,
        "num_head_slots": None,
        "tokens_per_state": 1,
        **more,
    }
    made = kind(**fields)
    made.page_size_bytes = made.num_kv_heads * page * (made.head_size + made.head_size_v) * made.dtype.itemsize
    return made


def groups(*parts):
    """Each part: a spec, and the numbers of its layers."""
    return [
        SimpleNamespace(kv_cache_spec=each, layer_names=[f"model.layers.{layer}.self_attn.attn" for layer in layers])
        for each, layers in parts
    ]


def configs(torch, *parts, tp=1, pp=1, rank=0, heads=2, device="cuda", blocks=64, **changes):
    """`vllm_config` and `kv_cache_config`."""
    parts = parts or ((spec(torch, heads=max(1, heads // tp)), (0, 1)),)
    text = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **changes.pop("rope", {})}
    fields = {
        "model": "org/tiny",
        "revision": None,
        "seed": 0,
        "dtype": torch.bfloat16,
        "quantization": None,
        "hf_config": SimpleNamespace(_commit_hash="a" * 40),
        "hf_text_config": SimpleNamespace(to_dict=lambda: text, num_hidden_layers=2, qk_rope_head_dim=4),
        "get_total_num_kv_heads": lambda: heads,
        **changes,
    }
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(**fields),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, pipeline_parallel_size=pp, rank=rank, world_size=tp * pp, decode_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto", calculate_kv_scales=False),
        load_config=SimpleNamespace(load_format="auto"),
        device_config=SimpleNamespace(device_type=device),
        speculative_config=None,
    )
    return vllm_config, SimpleNamespace(kv_cache_groups=groups(*parts), num_blocks=blocks)


class Request:
    """As vLLM's, with what a connector reads of it."""

    def __init__(self, name, tokens, *, session=None, params=None, salt=None, lora=None, items=(), computed=0):
        self.request_id, self.all_token_ids, self.num_prompt_tokens = name, list(tokens), len(tokens)
        self.session_id, self.kv_transfer_params, self.cache_salt = session, params, salt
        self.lora_request, self.mm_features, self.sampling_params = lora, list(items), None
        self.block_hashes = []
        self.num_preemptions = 0
        self.num_computed_tokens = computed
        self.pages = None

    @property
    def num_tokens(self):
        return len(self.all_token_ids)


class Engine:
    """One scheduler, `tp` x `pp` workers, and their memory.

    Args:
        order: The axes of a layer's cache [blocks, heads, tokens, content] as they lie in memory.
    """

    def __init__(self, torch, bridge, *parts, tp=1, pp=1, heads=2, order=(0, 1, 2, 3), blocks=64, workers=None, **extra):
        self.torch, self.bridge = torch, bridge
        settings = Settings.parse({"url": "memory://unused", "block_tokens": 8, **extra})
        self.model = model_of(*configs(torch, *parts, tp=tp, pp=pp, heads=heads, blocks=blocks), settings)
        self.scheduler = SchedulerHalf(self.model, settings, bridge, tp * pp, tells=True)
        self.free = list(range(1, blocks))
        self.workers = []
        for rank in range(tp * pp):
            vllm_config, kv_cache_config = configs(torch, *parts, tp=tp, pp=pp, rank=rank, heads=heads, blocks=blocks)
            layers = self.layers_of(rank // tp, pp)
            mine = list(kv_cache_config.kv_cache_groups)
            for group in mine:
                group.layer_names = [name for name in group.layer_names if int(name.split(".")[2]) in layers]
            model = model_of(vllm_config, kv_cache_config, settings)
            memory, caches = {}, {}  # the groups share it: a block belongs to one of them at a time
            for group in mine:
                for index, name in enumerate(group.layer_names):
                    caches[name] = memory.setdefault(index, self.cache(group.kv_cache_spec, blocks, order))
            place = Place.of_worker(vllm_config.parallel_config)
            half = WorkerHalf(model, place, bridge, blocks)
            half.register(caches)
            self.workers.append(SimpleNamespace(half=half, caches=caches, place=place, groups=mine))
        self.running, self.said = {}, Counter()
        self.hasty = False  # whether blocks that become free are the next to be used, or the last

    def layers_of(self, stage, stages):
        count = self.model.namespace.layers
        return range(stage * count // stages, (stage + 1) * count // stages)

    def cache(self, spec, blocks, order):
        shape = (blocks, spec.num_kv_heads, spec.block_size, spec.head_size + spec.head_size_v)
        flat = self.torch.zeros(tuple(shape[axis] for axis in order), dtype=spec.dtype)
        return flat.permute(*np.argsort(order))

    # --- KV ---

    def content(self, layer, head, tokens, width):
        """What a token's KV is: it follows from the token and those before it."""
        seed = crc32(np.array([layer, head, *tokens], np.uint32).tobytes())
        return self.torch.from_numpy(np.random.default_rng(seed).standard_normal(width, np.float32)).to(self.torch.bfloat16)

    def each(self, request, start, end):
        """(cache, page, slot, content) of every token, layer and head of every worker."""
        for worker in self.workers:
            for group, layers in enumerate(worker.groups):
                spec = layers.kv_cache_spec
                shards = max(1, self.model.namespace.kv_heads // spec.num_kv_heads)
                for name in layers.layer_names:
                    for token in range(start, end):
                        page = request.pages[group][token // spec.block_size]
                        if not page:
                            continue
                        for head in range(spec.num_kv_heads):
                            number = head + worker.place.rank * shards // worker.place.of * spec.num_kv_heads
                            tokens = request.all_token_ids[: token + 1]
                            value = self.content(int(name.split(".")[2]), number, tokens, spec.head_size + spec.head_size_v)
                            yield worker.caches[name], page, head, token % spec.block_size, value

    def compute(self, request, start, end):
        for cache, page, head, slot, value in self.each(request, start, end):
            cache[page, head, slot] = value

    def holds(self, request, end):
        """Whether the engine's memory has the right KV, bit by bit."""
        return all(
            self.torch.equal(cache[page, head, slot], value) for cache, page, head, slot, value in self.each(request, 0, end)
        )

    # --- what a scheduler does ---

    def admit(self, request, local=0):
        """Ask the connector, find room, begin to load. Returns how many tokens it loads."""
        ends = time.monotonic() + 30
        while (found := self.scheduler.matched(request, local))[0] is None:
            assert time.monotonic() < ends
            self.step()
        external, later = found
        assert later == (external > 0)
        self.take(request, local + external)
        if external:
            self.scheduler.allocated(request, request.pages, external)
        request.num_computed_tokens = local + external
        return external

    def take(self, request, tokens):
        request.pages = request.pages or [[] for _ in self.model.groups]
        for group, pages in enumerate(request.pages):
            while len(pages) * self.model.page_tokens[group] < tokens:
                pages.append(self.free.pop(0))

    def leave_windows(self, request):
        """As vLLM: blocks behind a window are somebody else's from now on, and nobody is told."""
        for pages, kind, tokens in zip(request.pages, self.model.namespace.groups, self.model.page_tokens, strict=True):
            gone = max(0, request.num_computed_tokens - kind.window + 1) // tokens if kind.kind == "window" else 0
            for index in range(gone):
                if pages[index]:
                    self.free.insert(0 if self.hasty else len(self.free), pages[index])
                    pages[index] = 0

    def give(self, request):
        for pages in request.pages or ():
            self.free += [page for page in pages if page]
        request.pages = None

    def step(self, scheduled=(), finished=()):
        """One step with (request, tokens) scheduled: as vLLM, what one worker finished counts when all did."""
        new, cached = [], SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        for request, tokens in scheduled:
            before = self.running.get(request.request_id)
            self.leave_windows(request)
            had = [len(pages) for pages in request.pages]
            self.take(request, request.num_computed_tokens + tokens)
            if before is None:
                pages = tuple(list(pages) for pages in request.pages)
                new.append(
                    SimpleNamespace(req_id=request.request_id, block_ids=pages, num_computed_tokens=request.num_computed_tokens)
                )
            else:
                anew = before != request.num_preemptions
                if anew:
                    cached.resumed_req_ids.add(request.request_id)
                cached.req_ids.append(request.request_id)
                cached.new_block_ids.append(
                    tuple(list(pages[0 if anew else had[group] :]) for group, pages in enumerate(request.pages))
                )
                cached.num_computed_tokens.append(request.num_computed_tokens)
            self.running[request.request_id] = request.num_preemptions
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={request.request_id: tokens for request, tokens in scheduled},
        )
        step = self.scheduler.step(output)
        for worker in self.workers:
            worker.half.before(step)
        for request, tokens in scheduled:
            self.compute(request, request.num_computed_tokens, request.num_computed_tokens + tokens)
            request.num_computed_tokens += tokens
        told = SimpleNamespace(sent=[], received=[], broken=set(), lost=set(), step=step)
        report = None
        for worker in self.workers:
            worker.half.begin_loads(step)
            worker.half.begin_saves(step)
            sent, received = worker.half.finished()
            told.sent += sent
            told.received += received
            told.broken |= worker.half.take_broken_blocks()
            told.lost |= worker.half.take_broken_requests()
            mine = worker.half.take_report()
            report = mine if report is None else report if mine is None else report.with_(mine)
        told.all_sent, told.all_received = self.all_said("sent", told.sent), self.all_said("received", told.received)
        self.scheduler.reported(report, told.all_received)
        return told

    def all_said(self, what, said):
        """Requests of which every worker has said it by now."""
        self.said.update((what, request) for request in said)
        done = [request for request in dict.fromkeys(said) if self.said[what, request] == len(self.workers)]
        for request in done:
            del self.said[what, request]
        return done

    def until(self, done):
        """Empty steps until `done(told)` is true of one; it is returned."""
        ends = time.monotonic() + 30
        while True:
            told = self.step()
            if done(told):
                return told
            assert time.monotonic() < ends
            time.sleep(0.001)

    # --- a whole request ---

    def load(self, request, local=0):
        """Admit it and wait for what it loads."""
        external = self.admit(request, local)
        if external:
            told = self.until(lambda told: request.request_id in told.all_received)
            if told.broken:
                size = self.model.page_tokens[0]
                bad = min(index for index, page in enumerate(request.pages[0]) if page in told.broken)
                request.num_computed_tokens = bad * size
            elif told.lost:
                request.num_computed_tokens = 0
        return external

    def run(self, request, *, chunk=100, decode=0, local=0):
        """From its arrival to its end; what it was told."""
        self.load(request, local)
        while request.num_computed_tokens < request.num_prompt_tokens:
            self.step([(request, min(chunk, request.num_prompt_tokens - request.num_computed_tokens))])
        for token in range(decode):
            request.all_token_ids.append(1000 + token)
            self.step([(request, 1)])
        return self.finish(request)

    def finish(self, request):
        held, told = self.scheduler.finished(request)
        self.running.pop(request.request_id, None)
        if held:
            self.until(lambda told: request.request_id in told.all_sent)
        self.give(request)
        return told

    def close(self):
        for worker in self.workers:
            worker.half.close()
        self.scheduler.close()
