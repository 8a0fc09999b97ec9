"""Times to the first token of a prompt of 4,001 tokens in bfloat16: computed, from the engine's own cache, and from each tier."""

import pytest
from test_vllm_connector import connector

TOKENS, ROUNDS = 4001, 3


@pytest.mark.more_engines
@pytest.mark.parametrize("block_tokens", [128, 256])
def test_times_to_first_token(engine, node, prompt, ttft, block_tokens):
    ids, others = prompt(TOKENS), [prompt(TOKENS, at=5000 * number) for number in range(1, 3)]
    fields = {"dtype": "bfloat16", "max_model_len": 4352}
    running = engine("vllm-times", connector=connector(node.url, block_tokens=block_tokens), **fields)

    def nothing():
        pass

    def forgotten():
        assert running.forget()

    def median(row, cached, before):
        answers, loaded = [], running.call("vllm_calls:counts")["blocks"].get("loaded", 0)
        for _ in range(ROUNDS):
            before()
            answers.append(running.generate(ids, max_tokens=1)[0])
            assert running.call("vllm_calls:settle") == 0
        assert {answer.cached for answer in answers} == {cached}
        loaded = running.call("vllm_calls:counts")["blocks"].get("loaded", 0) - loaded
        assert loaded == (0 if before is nothing else ROUNDS * (TOKENS // block_tokens))
        ttft(f"{row}, blocks of {block_tokens}", TOKENS, sorted(answers, key=lambda answer: answer.first_token_s)[ROUNDS // 2])

    running.generate(others[0], max_tokens=1)  # the first request of a process pays for much else
    ttft(f"cold, blocks of {block_tokens}", TOKENS, running.generate(others[1], max_tokens=1)[0])
    running.generate(ids, max_tokens=1)
    assert running.call("vllm_calls:settle") == 0
    median("local hit", 3968, nothing)
    whole = TOKENS // block_tokens * block_tokens
    median("DRAM", whole, forgotten)
    node.settled()

    def restarted():
        forgotten()
        node.restart()
        assert running.generate(ids[:64], max_tokens=1)  # the way to it is found again

    def wiped():
        forgotten()
        node.settled()
        node.wipe()
        assert running.generate(ids[:64], max_tokens=1)

    median("NVMe", whole, restarted)
    median("bucket", whole, wiped)
