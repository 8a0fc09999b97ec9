"""What is asked and answered at `/v1/route`: values alone, so that whoever asks needs nothing of a gateway."""

from __future__ import annotations

import msgspec

from kvstore.mesh.price import Priced


class RouteAsked(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/route`: exactly one of `token_ids` and `prefix_ids`.

    Attributes:
        token_ids: The prompt.
        prefix_ids: Its full blocks, by name; `tokens` says how long it is.
        tokens: See there.
        salt: Cache salt of `token_ids`.
    """

    model: str = ""
    token_ids: list[int] | None = None
    prefix_ids: list[str] | None = None
    tokens: int = 0
    salt: str = ""


class RouteChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, and what was predicted for it.

    Attributes:
        engine: Its name.
        url: Its base; "" for whoever has not the scope `admin`.
        predicted: See there.
    """

    engine: str
    url: str
    predicted: Priced


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/decisions`: one request that was sent to an engine, and why there.

    Attributes:
        number: Counts them.
        age_s: Seconds since it was sent.
        engine: Where to.
        candidates: What was predicted for it and for others, the cheapest first; empty where nothing was known of the prompt, which
            then went by load.
        first_byte_ms: What it took to the first byte; None where it has not come, or the answer did not stream.
        under_way: Whether the engine works on it.
    """

    number: int
    age_s: float
    engine: str
    candidates: list[Priced]
    first_byte_ms: float | None = None
    under_way: bool = True


class Routes(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: the cheapest first."""

    candidates: list[RouteChoice]
