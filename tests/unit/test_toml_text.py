"""Configuration and tokens as TOML: what would take a node's memory is refused before it is read."""

import pytest

from kvstore.access import Tokens
from kvstore.errors import Invalid
from kvstore.toml_text import parse_toml

DEEP = ".".join("a" * 2000)


@pytest.mark.parametrize(
    "text",
    [
        f"tokens.{DEEP} = 1",
        f"x = 1\n[{DEEP}]",
        " . ".join(['"a"'] * 2000) + " = 1",
        f'x = {{ a = """y"""", {DEEP} = 1, b = "" }}',  # four quotes end that string: what follows is no part of one
        f"x = {{ a = '''y'''', {DEEP} = 1, b = '' }}",
    ],
)
def test_a_key_of_very_many_parts_is_refused(text):
    with pytest.raises(Invalid, match="has more than 16 dots"):
        Tokens.parse(text)


def test_dots_in_strings_and_comments_are_no_keys():
    dots = "." * 1000
    text = (
        f'# {dots}\na = "{dots}\\"{dots}" # {dots}\nb = \'{dots}\'\nc = """\n{dots}\n"{dots}""""\nd = \'\'\'{dots}\'{dots}\'\'\'\n'
    )
    assert parse_toml(text, "x")["c"] == f'{dots}\n"{dots}"'
