"""Sizes and durations as settings spell them, and the conversion of one value to what its field must be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, get_args

import msgspec

from kvstore.errors import Invalid

_UNITS: Final = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SECONDS: Final = {"": 1, "S": 1, "M": 60, "MIN": 60, "H": 3600, "D": 86400, "W": 604800}
_MOST: Final = (1 << 63) - 1
_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Bytes(int):
    """A size in bytes; settings spell it `4GiB`, `500MB` or a plain number."""


class Seconds(int):
    """A duration in seconds; settings spell it `12h`, `30d` or a plain number."""


def _quantity(text: str | int, units: Mapping[str, int], field: str, example: str) -> int:
    match = _QUANTITY.fullmatch(str(text))
    if match is None or match[2].upper() not in units:
        raise Invalid(f"{field} is {text!r}; write it like {example}")
    number = float(match[1]) * units[match[2].upper()]
    if number > _MOST:
        raise Invalid(f"{field} is {str(text)[:40]!r}; at most {_MOST} is possible")
    return int(number)


def parse_bytes(text: str | int, field: str = "size") -> Bytes:
    """`4GiB`, `500MB`, `1024` as bytes. Raises `Invalid`."""
    return Bytes(_quantity(text, _UNITS, field, "4GiB or 500MB"))


def parse_seconds(text: str | int, field: str = "duration") -> Seconds:
    """`30s`, `12h`, `7d` as seconds. Raises `Invalid`."""
    return Seconds(_quantity(text, _SECONDS, field, "30s, 12h or 7d"))


def convert(kind: Any, value: object, field: str) -> object:
    """What a text or a value of TOML means for a field of this type. Raises `Invalid`, which names the field."""
    if isinstance(value, str) and not value.isascii() and value.encode(errors="replace").decode() != value:
        raise Invalid(f"{field} is {value!r}; it must be valid UTF-8")  # as the system hands over a variable that is none
    if kind is Bytes and isinstance(value, (str, int)):
        return parse_bytes(value, field)
    if kind is Seconds and isinstance(value, (str, int)):
        return parse_seconds(value, field)
    if kind is bool and isinstance(value, str) and value.lower() in {"yes", "no", "on", "off"}:
        return value.lower() in {"yes", "on"}
    if kind == tuple[str, ...] and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        choices = get_args(kind)
        if kind == tuple[str, ...]:
            expected = "a list of texts"
        else:
            expected = f"one of {', '.join(map(str, choices))}" if choices else f"a {kind.__name__}"
        raise Invalid(f"{field} is {value!r}; it must be {expected}") from None
