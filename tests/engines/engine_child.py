"""What runs inside an engine's process: commands as JSON lines on standard input, one answer a line on standard output.

Whatever the engine itself prints goes to the log. This file knows vLLM and nothing of kvtier: connectors come by configuration.
"""

import importlib
import json
import os
import sys
import time
import traceback

from vllm import LLM, SamplingParams

DEFAULTS = {
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "dtype": "float32",  # where a restored prefix gives the same tokens as a computed one
    "distributed_executor_backend": "uni",
    "disable_log_stats": False,  # without statistics there is no time to first token
}


class Child:
    def __init__(self):
        self.llm = None

    def load(self, model, **fields):
        self.llm = LLM(model, **(DEFAULTS | fields))

    def generate(self, prompts, sampling):
        prompts = [{"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt for prompt in prompts]
        begun = time.perf_counter()
        done = self.llm.generate(prompts, SamplingParams(**sampling), use_tqdm=False)
        seconds = time.perf_counter() - begun
        return [
            {
                "tokens": list(each.outputs[0].token_ids),
                "text": each.outputs[0].text,
                "finish_reason": each.outputs[0].finish_reason,
                "cached": each.num_cached_tokens or 0,
                "first_token_s": each.metrics.first_token_latency if each.metrics else None,
                "kv_transfer_params": each.kv_transfer_params,
                "seconds": seconds,
            }
            for each in done
        ]

    def forget(self, connector):
        """Drop the engine's own prefix cache; with `connector`, also what its connector keeps in the engine's memory."""
        return self.llm.reset_prefix_cache(reset_connector=connector)

    def call(self, function, arguments):
        """`module:function` beside this file, with the engine as its first argument."""
        module, name = function.split(":")
        return getattr(importlib.import_module(module), name)(self.llm, **arguments)

    def close(self):
        """In order, as a server does when it is told to stop."""
        self.llm.llm_engine.engine_core.shutdown()


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    child = Child()
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            answer = {"answer": getattr(child, do)(**request)}
        except Exception as error:  # noqa: BLE001  the test is told, and decides
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer, default=str), file=answers, flush=True)
        if do == "close":
            return
