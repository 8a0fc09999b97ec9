"""A target of fuzzing."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """One parser.

    Attributes:
        name: On the command line.
        run: Gives it bytes.
        seeds: Inputs that it accepts, or nearly: where mutation begins.
        words: What its language is made of.
        longest: Bytes of an input.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()
    longest: int = 4096


def text_of(data: bytes) -> str:
    """As Python reads arguments and variables: what is no UTF-8 becomes lone surrogates."""
    return data.decode(errors="surrogateescape")


def same(mine: object, again: object) -> None:
    """What was written reads as what it was."""
    assert mine == again, f"read {mine!r}, wrote it, and read {again!r}"
