"""What is learned of a model's and a tier's speed from a few observations, some of them wrong."""

import pytest

from kvstore.cost import REMEMBERED, Costs

A, B = 100e-6, 20e-9


def took(start, tokens):
    return A * tokens + B * sum(range(start, start + tokens))


class Now:
    t = 0.0

    def __call__(self):
        return self.t


@pytest.fixture
def now():
    return Now()


@pytest.fixture
def costs(now):
    return Costs(now)


def test_both_coefficients_of_a_model_are_found(costs):
    for start, tokens in ((0, 600), (0, 3000), (2000, 500), (500, 100)):
        costs.observe_compute(start, tokens, took(start, tokens))
    for start, stop in ((0, 4096), (3000, 4096), (10_000, 20_000), (0, 1)):
        assert costs.compute(start, stop) == pytest.approx(took(start, stop - start), rel=1e-6)
    assert costs.compute(7, 7) == 0


def test_one_pass_tells_nothing_and_steps_of_decoding_never_do(costs):
    for _ in range(50):
        costs.observe_compute(100, 1, 0.03)
    assert costs.compute(0, 1000) is None
    costs.observe_compute(0, 1000, took(0, 1000))
    assert costs.compute(0, 1000) is None
    costs.observe_compute(0, 1000, took(0, 1000))
    assert costs.compute(0, 1000) == pytest.approx(took(0, 1000))


def test_passes_that_are_alike_give_a_speed_and_no_invented_slope(costs):
    for tokens, noise in ((1000, 1.0), (1010, 0.93), (990, 1.06), (1005, 1.02)):
        costs.observe_compute(0, tokens, 1e-4 * tokens * noise)
    assert costs.compute(0, 8000) == pytest.approx(0.8, rel=0.05)


def test_no_coefficient_is_negative(costs):
    for start, tokens, seconds in ((0, 1000, 0.2), (8000, 1000, 0.1), (0, 1000, 0.2), (8000, 1000, 0.1)):
        costs.observe_compute(start, tokens, seconds)
    assert 0.1 < costs.compute(0, 1000) < 0.2
    assert 0.1 < costs.compute(8000, 9000) < 0.2


def test_a_warm_up_moves_what_is_known_little_and_is_forgotten(costs):
    costs.observe_compute(0, 1000, 8 * took(0, 1000))
    costs.observe_compute(0, 1000, took(0, 1000))
    assert costs.compute(0, 1000) < 1.5 * took(0, 1000)
    for _ in range(REMEMBERED):
        costs.observe_compute(0, 1000, took(0, 1000))
    assert costs.compute(0, 1000) == pytest.approx(took(0, 1000))


def test_latency_and_bandwidth_of_a_tier_are_told_apart(costs):
    for nbytes in (1 << 20, 32 << 20, 8 << 20):
        costs.observe_load("bucket", nbytes, 0.02 + nbytes / 200e6)
    assert costs.load("bucket", 100 << 20) == pytest.approx(0.02 + (100 << 20) / 200e6, rel=1e-6)
    assert costs.load("bucket", 100 << 20, 5) == pytest.approx(0.10 + (100 << 20) / 200e6, rel=1e-6)
    assert costs.load("nvme", 1) is None


def test_a_value_that_was_nearer_than_thought_moves_a_tier_little(costs):
    for _ in range(5):
        costs.observe_load("bucket", 8 << 20, 0.08)
    costs.observe_load("bucket", 8 << 20, 0.001)
    assert 0.04 < costs.load("bucket", 8 << 20) < 0.08


def test_a_tier_that_was_given_up_is_slow_until_it_answers(costs):
    costs.observe_load("bucket", 1 << 20, 0.01)
    assert costs.trusts("bucket")
    costs.observe_load("bucket", 1 << 20, 0.5, whole=False)
    assert not costs.trusts("bucket")
    assert costs.load("bucket", 1 << 20) == pytest.approx(0.5)  # at least: what was thought before is dropped
    costs.observe_load("bucket", 1 << 20, 0.1, whole=False)  # given up earlier than that: nothing new
    assert costs.load("bucket", 1 << 20) == pytest.approx(0.5)
    costs.observe_load("bucket", 1 << 20, 2.0)
    assert costs.trusts("bucket")
    assert costs.load("bucket", 1 << 20) == pytest.approx(2.0)


def test_a_request_that_was_given_up_is_remembered_beside_larger_ones_that_were_answered(costs, now):
    costs.observe_load("bucket", 2 << 20, 0.040, whole=False)
    costs.observe_load("bucket", 4 << 20, 0.056)
    assert costs.load("bucket", 2 << 20) == pytest.approx(0.040)  # not half of what twice as much took
    assert costs.load("bucket", 1 << 20) == pytest.approx(0.014)
    assert costs.load("bucket", 8 << 20) == pytest.approx(0.112)
    costs.observe_load("bucket", 4 << 20, 0.030)
    assert costs.load("bucket", 2 << 20) < 0.030
    costs.observe_load("bucket", 2 << 20, 0.300, whole=False)
    costs.observe_load("bucket", 2 << 20, 0.010)
    now.t = 901
    costs.observe_load("bucket", 2 << 20, 0.010)
    assert costs.load("bucket", 2 << 20) == pytest.approx(0.010)


def test_what_was_seen_of_a_tier_is_forgotten_before_what_was_seen_of_the_model(costs, now):
    for _ in range(2):
        costs.observe_compute(0, 1000, 0.1)
    costs.observe_load("bucket", 1 << 20, 9.0)
    now.t = 1000
    assert costs.load("bucket", 1 << 20) is None
    assert not costs.trusts("bucket")
    assert costs.compute(0, 1000) == pytest.approx(0.1)
    now.t = 10_000
    assert costs.compute(0, 1000) is None
