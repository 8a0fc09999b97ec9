"""`kvtier route`: where a gateway would send a prompt, and why."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import typer

from kvstore.cli import output
from kvstore.cli.output import Format, FormatOption
from kvstore.errors import Invalid, Unavailable, Unsupported
from kvstore.gateway.routes import RouteAsked, Routes

app = typer.Typer(add_completion=False)
DEFAULT_GATEWAY: Final = "http://127.0.0.1:7900"
_WAIT_S: Final = 10.0


@app.command()
def route(
    tokens: Annotated[typer.FileText, typer.Argument(metavar="FILE", help="Token ids, as a JSON list; - is standard input.")],
    url: Annotated[
        str, typer.Option("--gateway", envvar="KVTIER_GATEWAY", metavar="URL", help="Which gateway to ask.")
    ] = DEFAULT_GATEWAY,
    form: FormatOption = Format.table,
) -> None:
    """Ask a gateway where it would send a prompt; nothing is sent anywhere."""
    try:
        ids = msgspec.json.decode(tokens.read(), type=list[int])
    except msgspec.MsgspecError as error:
        raise Invalid(f"{tokens.name} is no JSON list of token ids: {error}") from None
    found = _ask(url, RouteAsked(token_ids=ids))
    if form is Format.json:
        for each in found.candidates:
            output.print_json(each)
        return
    columns = ["engine", "ms", "queue", "load", "compute", "gpu", "dram", "nvme", "peer", "bucket", "computed"]
    rows = []
    for each in found.candidates:
        said = each.predicted
        times = [f"{one:.1f}" for one in (said.ms, said.queue_ms, said.load_ms, said.compute_ms)]
        rows.append([each.engine, *times, *msgspec.structs.astuple(said.tokens)])
    output.print_table(columns, rows, empty="no engine takes requests now")


def _ask(url: str, asked: RouteAsked) -> Routes:
    import urllib.error  # noqa: PLC0415  with the other
    import urllib.request  # noqa: PLC0415  one request of one command

    if not url.startswith(("http://", "https://")):
        raise Invalid(f"--gateway is {url!r}; write it like {DEFAULT_GATEWAY}")
    body, headers = msgspec.json.encode(asked), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/route", body, headers)  # noqa: S310  the scheme is checked
    try:
        with urllib.request.urlopen(request, timeout=_WAIT_S) as answer:  # noqa: S310  the scheme is checked
            return msgspec.json.decode(answer.read(), type=Routes)
    except urllib.error.HTTPError as error:
        raise Invalid(f"{url} answers {error.code}: {error.read(1000).decode(errors='replace')}") from None
    except OSError as error:
        raise Unavailable(f"no gateway answers at {url}: {error}", remedy="start one: kvtier gateway --engine NAME=URL") from None
    except msgspec.MsgspecError as error:
        raise Unsupported(f"{url} is no gateway of this version: {error}") from None
