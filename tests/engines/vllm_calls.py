"""Runs inside an engine's process, by `engine.call("vllm_calls:...")`: what `LLM.generate` cannot do, what a connector counts."""

import time

from prometheus_client import REGISTRY
from vllm import SamplingParams


def core(llm):
    return llm.llm_engine.engine_core.engine_core


def connector(llm):
    return core(llm).scheduler.connector


def abort(llm, prompt, steps):
    """Begin a request, abort it after so many steps, and step until nothing is left of it; as `settle`."""
    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    name = engine.add_request("aborted", {"prompt_token_ids": prompt}, params)
    for _ in range(steps):
        engine.step()
    engine.abort_request([name or "aborted"], internal=True)
    return settle(llm)


def settle(llm):
    """Step until nothing waits for a connector any more; how many requests are left then."""
    scheduler, ends = core(llm).scheduler, time.monotonic() + 30
    while scheduler.has_requests() and time.monotonic() < ends:
        llm.llm_engine.step()
    return len(scheduler.requests) + len(connector(llm)._scheduler._jobs)


def counts(llm):
    """What the connector counted since the engine started."""
    found = connector(llm)._bridge.counts
    return {field: dict(getattr(found, field)) for field in found.__struct_fields__}


def free_blocks(llm):
    return core(llm).scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def time_lookups(llm):
    """From now on, how long each question of the scheduler takes is written down."""
    half, times = connector(llm)._scheduler, []
    matched = half.matched

    def timed(request, computed):
        begun = time.perf_counter()
        try:
            return matched(request, computed)
        finally:
            times.append(time.perf_counter() - begun)

    half.matched, half.times = timed, times


def lookup_times(llm):
    return connector(llm)._scheduler.times


def preemptions(llm):
    """How often the scheduler took a request's blocks away since `count_preemptions`."""
    return core(llm).scheduler.preempted


def count_preemptions(llm):
    scheduler = core(llm).scheduler
    preempt, scheduler.preempted = scheduler._preempt_request, 0

    def counted(*arguments, **more):
        scheduler.preempted += 1
        return preempt(*arguments, **more)

    scheduler._preempt_request = counted


def connected(llm, within_s):
    """Whether a node has been reached by then."""
    return connector(llm)._bridge.wait_connected(within_s)


def metrics(llm):
    """What the connector shows to Prometheus: the value of each counter, by its name and outcome."""
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples if sample.name.startswith("kvtier_engine_")]
    return {f"{sample.name} {sample.labels['outcome']}": sample.value for sample in samples if sample.name.endswith("_total")}
