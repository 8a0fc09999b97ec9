"""Inputs by Hypothesis: seeds with bytes changed, cut out, said again and put in, and words of the language between them."""

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st


@st.composite
def inputs(draw, target):
    data = bytearray(draw(st.sampled_from(target.seeds)) if draw(st.integers(0, 9)) else draw(st.binary(max_size=64)))
    words = st.sampled_from(target.words) if target.words else st.binary(max_size=8)
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 16)))
        match draw(st.integers(0, 5)):
            case 0:
                data[at:end] = b""
            case 1:
                data[at:at] = draw(words)
            case 2:
                data[at:end] = draw(st.binary(max_size=8))
            case 3:
                data[at:at] = data[at:end] * draw(st.sampled_from((1, 2, 50)))
            case 4 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case _:
                data[at:end] = draw(words)
    return bytes(data[: target.longest])


def tried(target, *, seed, examples):
    """The first input, made small, that breaks the target, and how; None where none of that many does."""
    last = b""

    @seeded(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    @given(inputs(target))
    def attempt(data):
        nonlocal last
        last = data
        target.run(data)

    try:
        attempt()
    except Exception as error:  # noqa: BLE001  whatever escapes is what is looked for
        return last, error
    return None
