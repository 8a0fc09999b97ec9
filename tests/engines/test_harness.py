"""What the other tests stand on: an engine without a tier."""


def test_an_engine_answers_alike_with_and_without_its_own_cache(engine, prompt, ttft):
    running = engine("plain")
    ids = prompt(1000)
    cold = running.generate(ids)[0]
    again = running.generate(ids)[0]
    assert running.forget()
    forgotten = running.generate(ids)[0]
    assert (cold.cached, again.cached, forgotten.cached) == (0, 896, 0)  # blocks of 128
    assert cold.tokens == again.tokens == forgotten.tokens
    ttft("cold", 1000, forgotten)
    ttft("local hit", 1000, again)
    running.close()
