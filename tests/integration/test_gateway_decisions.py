"""What a gateway tells of its last decisions: which engine, compared with which, and what it took; never more than it may keep."""

import msgspec

from kvstore.gateway.decisions import KEPT, Decisions
from kvstore.gateway.routes import Decision
from kvstore.mesh.price import Priced, Tokens
from tests.integration.gateway_fleet import open_fleet


def priced(name):
    times = dict.fromkeys(("ms", "price", "queue_ms", "load_ms", "compute_ms", "imbalance_ms"), 1.0)
    return Priced(candidate=name, split=0, found=0, tokens=Tokens(computed=8), **times)


def test_the_last_ones_are_kept_newest_first_and_only_the_cheapest_engines_of_each():
    now = [100.0]
    decisions = Decisions(lambda: now[0])
    numbers = [decisions.made(f"e{index}", [priced(f"e{each}") for each in range(40)]) for index in range(KEPT + 5)]
    decisions.first_byte(numbers[0], 1.0)  # of one that was forgotten
    decisions.first_byte(numbers[-1], 0.25)
    decisions.over(numbers[-1])
    now[0] += 7
    shown = decisions.shown()
    assert [each.number for each in shown] == numbers[: -KEPT - 1 : -1]
    assert (shown[0].age_s, shown[0].first_byte_ms, shown[0].under_way) == (7.0, 250.0, False)
    assert (shown[1].first_byte_ms, shown[1].under_way) == (None, True)
    assert [each.candidate for each in shown[0].candidates] == [f"e{index}" for index in range(16)]


async def test_decisions_are_told_over_http_without_a_word_of_the_prompt():
    async with open_fleet() as fleet:
        _, headers, _ = await fleet.ask("a secret thing", stream=True)
        async with fleet.client.get(f"{fleet.gateway.url}/v1/decisions") as answer:
            text = await answer.read()
        (one,) = msgspec.json.decode(text, type=list[Decision])
        assert one.engine == headers["X-KVTier-Engine"]
        assert not one.under_way
        assert one.first_byte_ms > 0
        assert {each.candidate for each in one.candidates} == {"a", "b"}
        assert b"secret" not in text
        async with fleet.client.get(f"{fleet.gateway.url}/") as page:
            assert 'data-face="gateway"' in await page.text()
            assert "Server" not in page.headers
