"""What the installed command `kvtier` runs."""

from __future__ import annotations

import sys


def main() -> None:
    """The command line; says what is missing where only the base package is installed."""
    try:
        from kvstore.cli.commands import app  # noqa: PLC0415  typer and rich come with an extra
    except ModuleNotFoundError as error:
        sys.exit(f"error: the command needs {error.name}\n  pip install 'kvtier[node]'; in a checkout: pip install '.[node]'")
    sys.exit(app())
