"""Commands that ask a running node: which one."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import typer

DEFAULT_URL: Final = "kvtier://127.0.0.1:7878"  # where `kvtier up` and `kvtier serve` listen by default

UrlOption: TypeAlias = Annotated[str, typer.Option("--url", envvar="KVTIER_URL", metavar="URL", help="Which node to ask.")]
