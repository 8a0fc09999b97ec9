"""TOML, where every way of being wrong is one error."""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

from kvstore.errors import Invalid

_MOST_DOTS: Final = 16  # in a line; no key of ours has more than three parts
_QUOTED: Final = re.compile(
    r'''"""(?:[^"\\]|\\[\s\S]|"(?!""))*+"{0,5}|"(?:[^"\\\n]|\\.)*+"?|#[^\n]*'''
    r"""|'''(?:[^']|'(?!''))*+'{0,5}|'[^'\n]*+'?"""
)
"""Strings and comments. One without an end goes on to where it is an error, so that each character is looked at once."""


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The document in a text.

    Args:
        text: TOML.
        name: Whose it is, for the message, which may quote a line of it.

    Raises:
        Invalid: It is none; a line has very many dots; or a number has more digits, or a value more levels, than Python reads.
    """
    try:
        text.encode()  # lone surrogates stand for what was no UTF-8
        _check_dots(text, name)
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{name} is not valid TOML: {error}") from None


def _check_dots(text: str, name: str) -> None:
    """For a key of very many parts `tomllib` takes time and memory by the square of their number."""
    plain = _QUOTED.sub(lambda found: "\n" * found[0].count("\n"), text)
    for number, line in enumerate(plain.split("\n"), 1):
        if line.count(".") > _MOST_DOTS:
            raise Invalid(f"{name} is not valid here: line {number} has more than {_MOST_DOTS} dots outside of strings")
