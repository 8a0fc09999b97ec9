"""TOML, where every way of being wrong is one error."""

from __future__ import annotations

import tomllib
from typing import Any

from kvstore.errors import Invalid


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The document in a text.

    Args:
        text: TOML.
        name: Whose it is, for the message, which may quote a line of it.

    Raises:
        Invalid: It is none; or a number has more digits, or a value more levels, than Python reads.
    """
    try:
        text.encode()  # lone surrogates stand for what was no UTF-8
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{name} is not valid TOML: {error}") from None
