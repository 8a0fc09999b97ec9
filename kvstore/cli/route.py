"""`kvtier route`: where a gateway would send a prompt, and why."""

from __future__ import annotations

import os
from typing import Annotated, Final

import msgspec
import typer

from kvstore.cli import output
from kvstore.cli.output import Format, FormatOption
from kvstore.client.credential import Credential
from kvstore.config import StorageUrl
from kvstore.errors import Denied, Invalid, KVTierError, Problem, Unavailable, Unsupported
from kvstore.gateway.routes import RouteAsked, Routes
from kvstore.mesh.price import Tokens

app = typer.Typer(add_completion=False)
DEFAULT_GATEWAY: Final = "http://127.0.0.1:7900"
_WAIT_S: Final = 10.0
_REFUSAL: Final = 1 << 16


@app.command()
def route(
    tokens: Annotated[
        typer.FileText,
        typer.Argument(metavar="FILE", help='Token ids, as a JSON list or {"token_ids": [...]}; - is standard input.'),
    ],
    url: Annotated[
        str, typer.Option("--gateway", envvar="KVTIER_GATEWAY", metavar="URL", help="Which gateway to ask.")
    ] = DEFAULT_GATEWAY,
    form: FormatOption = Format.table,
) -> None:
    """Ask a gateway where it would send a prompt; nothing is sent anywhere."""
    try:
        said = msgspec.json.decode(tokens.read(), type=list[int] | RouteAsked)
    except msgspec.MsgspecError as error:
        raise Invalid(f'{tokens.name} is neither a JSON list of token ids nor {{"token_ids": [...]}}: {error}') from None
    found = _ask(url, RouteAsked(token_ids=said) if isinstance(said, list) else said)
    if form is Format.json:
        for each in found.candidates:
            output.print_json(each)
        return
    columns = ["engine", "price", "ms", "queue", "load", "compute", "imbalance"]
    rows = []
    for each in found.candidates:
        of = each.predicted
        times = [round(one, 1) for one in (of.price, of.ms, of.queue_ms, of.load_ms, of.compute_ms, of.imbalance_ms)]
        rows.append([each.engine, *times, *msgspec.structs.astuple(of.tokens)])
    output.print_table([*columns, *Tokens.__struct_fields__], rows)


def _ask(url: str, asked: RouteAsked) -> Routes:
    import urllib.error  # noqa: PLC0415  for the request below
    import urllib.request  # noqa: PLC0415  one request of one command

    if not url.startswith(("http://", "https://")):
        raise Invalid(f"--gateway is {url!r}; write it like {DEFAULT_GATEWAY}")
    body, headers = msgspec.json.encode(asked), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/route", body, headers)  # noqa: S310  the scheme is checked
    for name, value in Credential.find(StorageUrl(scheme="kvtier"), os.environ).headers().items():
        request.add_unredirected_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=_WAIT_S) as answer:  # noqa: S310  the scheme is checked
            return msgspec.json.decode(answer.read(), type=Routes)
    except urllib.error.HTTPError as error:
        raise _refusal(url, error.code, error.read(_REFUSAL)) from None
    except OSError as error:
        raise _unreached(url, getattr(error, "reason", error)) from None  # urllib wraps the system's own
    except msgspec.MsgspecError as error:
        raise Unsupported(f"{url} is no gateway of this version: {error}") from None


def _unreached(url: str, error: object) -> Unavailable:
    import ssl  # noqa: PLC0415  only a failure needs it, and it takes long to import

    why = getattr(error, "strerror", None) or error
    if isinstance(error, ssl.SSLCertVerificationError):
        return Unavailable(
            f"{url}: its certificate is not trusted ({error.verify_message})",
            kind="untrusted_certificate",
            remedy="set SSL_CERT_FILE to the authority that signed it, and name the host as it does",
        )
    remedy = "start one: kvtier gateway --engine NAME=URL"
    if isinstance(error, ssl.SSLError):
        remedy = "where the gateway has no [tls], write http://"
    elif isinstance(error, ConnectionResetError) and url.startswith("http:"):  # it was there, and did not like what it heard
        remedy = "where the gateway has [tls], write https://, and set SSL_CERT_FILE to an authority of your own"
    return Unavailable(f"no gateway answers at {url}: {why}", remedy=remedy)


def _refusal(url: str, status: int, body: bytes) -> KVTierError:
    try:
        return msgspec.json.decode(body, type=Problem).error()
    except msgspec.MsgspecError:  # whatever stands before the gateway
        kind = Unavailable if status >= 500 else Denied if status in {401, 403} else Invalid
        return kind(f"{url} answers {status}")
