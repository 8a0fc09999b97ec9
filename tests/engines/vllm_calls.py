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
    return connector(llm)._bridge.counts.all()


def free_blocks(llm):
    return core(llm).scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def time_lookups(llm):
    """From now on, how long each question of the scheduler takes is written down, and how long until it had its answer."""
    asked = connector(llm)
    parts = {"matched": (asked, "get_num_new_matched_tokens")}
    if (offloading := getattr(asked, "connector_scheduler", None)) is not None:
        (tier,) = offloading.manager.secondary_tiers
        parts |= {"lookup": (tier, "lookup"), "step": (tier, "on_schedule_end")}
    asked.calls, asked.answers = {}, {}
    for name, (owner, method) in parts.items():
        asked.calls[name], asked.answers[name] = [], []
        setattr(owner, method, _timed(getattr(owner, method), asked.calls[name], asked.answers[name]))


def _timed(method, calls, answers):
    first = {}  # by what is asked about: since when

    def timed(about, *more):
        begun = time.perf_counter()
        answer = method(about, *more)
        ended = time.perf_counter()
        calls.append(ended - begun)
        name = getattr(about, "request_id", about)
        since = first.setdefault(name, begun) if isinstance(name, str | bytes) else begun
        if not (answer == (None, False) or getattr(answer, "name", "") == "RETRY"):
            first.pop(name, None) if isinstance(name, str | bytes) else None
            answers.append(ended - since)
        return answer

    return timed


def lookup_times(llm):
    """Seconds by what was asked, since this was last called: `calls` of each call, `answers` from the first one to the answer."""
    asked = connector(llm)
    said = {"calls": {name: list(times) for name, times in asked.calls.items()}}
    said["answers"] = {name: list(times) for name, times in asked.answers.items()}
    for times in (*asked.calls.values(), *asked.answers.values()):
        times.clear()
    return said


def ask_again(llm, prompts, connector):
    """Each prompt once, when the engine has forgotten it; with `connector`, its host memory, too."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    cached = 0
    for prompt in prompts:
        while not llm.reset_prefix_cache(reset_connector=connector):
            llm.llm_engine.step()  # something of the last one is still being saved
        (done,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        cached += done.num_cached_tokens or 0
    return cached


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
