"""`kvtier replay`: what nodes, tiers and routers would do with a trace, by a virtual clock."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from kvstore.cli import output
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.svg import Bar, Group, draw
from kvstore.errors import Invalid
from kvstore.mesh.replay import NOTICED_S, TOLD_S, Answer, Replay
from kvstore.mesh.replay_costs import MACHINES, Machine
from kvstore.mesh.replay_nodes import POLICIES, Change, Setup
from kvstore.mesh.replay_report import Figure, Setting, Summary, halves, pool, summary
from kvstore.mesh.replay_routers import BASELINE, ROUTERS
from kvstore.mesh.replay_trace import BLOCK_TOKENS, Request, read

AFTER_S: Final = 600.0  # that are looked at when nodes came or went
_MOST_NODES: Final = 256
_CHANGE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?):([a-z][a-z0-9]{0,31})")

app = typer.Typer(add_completion=False)


@app.command()
def replay(
    *,
    trace: Annotated[
        Path, typer.Argument(help="JSON lines in the format of Mooncake: timestamp, input_length, output_length, hash_ids.")
    ],
    router: Annotated[
        list[str] | None, typer.Option("--router", help=f"One or more of {', '.join(ROUTERS)}; all by default.")
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=_MOST_NODES, help="n0, n1, ...")] = 8,
    dram: Annotated[int, typer.Option("--dram", min=1, max=1 << 24, help="Blocks of 512 tokens in a node's memory.")] = 3000,
    nvme: Annotated[int, typer.Option("--nvme", min=0, max=1 << 24, help="Blocks on its disk; 0: it has none.")] = 0,
    sharing: Annotated[bool, typer.Option("--sharing/--no-sharing", help="Whether nodes load from each other.")] = True,
    bucket: Annotated[
        bool, typer.Option("--bucket/--no-bucket", help="Whether there is a bucket, which keeps everything.")
    ] = False,
    policy: Annotated[str, typer.Option("--policy", help=f"Of the memory: {', '.join(POLICIES)}.")] = "reuse",
    speedup: Annotated[
        float, typer.Option("--speedup", min=0.001, max=1000.0, help="Requests arrive so many times as fast.")
    ] = 1.0,
    die: Annotated[list[str] | None, typer.Option("--die", metavar="SECONDS:NODE", help="A node dies then, as in 1200:n3.")] = None,
    join: Annotated[list[str] | None, typer.Option("--join", metavar="SECONDS:NODE", help="A node joins then, empty.")] = None,
    machine: Annotated[str, typer.Option("--machine", help=f"What a node is: {', '.join(MACHINES)}.")] = "8b-h100",
    constant: Annotated[
        list[str] | None,
        typer.Option("--constant", metavar="NAME=NUMBER", help="Replace one of its constants, as they are printed."),
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw times to first token.")] = None,
    form: FormatOption = Format.table,
) -> None:
    """Replay a trace on a mesh of simulated nodes, by each router: hits, time to first token, balance, bytes and cost.

    Policy, price and router are the ones that nodes run. Nothing is measured: times follow from the constants, which are printed.
    """
    _known("router", router or [], ROUTERS)
    _known("policy", [policy], POLICIES)
    _known("machine", [machine], MACHINES)
    chosen = sorted(
        dict.fromkeys(router or ROUTERS), key=lambda name: name != BASELINE
    )  # it runs first: others are compared with it
    changes = [*_changes(die or [], joins=False), *_changes(join or [], joins=True)]
    setup = Setup(
        machine=_with(MACHINES[machine], constant or []),
        router="",
        nodes=nodes,
        dram=dram,
        nvme=nvme,
        sharing=sharing,
        bucket=bucket,
        policy=policy,
        speed=speedup,
        changes=sorted(changes, key=lambda one: one.at_s),
    )
    _check(setup)
    requests = read(trace)
    shown = _Shown(form, setup, requests, machine)
    for name in chosen:
        with output.waiting(f"replaying: {name}"):
            shown.run(name)
    shown.end(svg)


class _Shown:
    """Runs, and what is printed of them."""

    def __init__(self, form: Format, setup: Setup, requests: Sequence[Request], machine: str) -> None:
        self._form, self._setup, self._requests = form, setup, requests
        self._pool = pool(setup, requests)
        self._found: dict[str, Summary] = {}
        self._halves: dict[str, tuple[Summary, Summary]] = {}
        self._after: dict[str, tuple[Summary, Summary]] = {}
        if form is Format.json:
            output.print_json(_setting(setup, len(requests), machine))
            for name, value in _constants(setup.machine).items():
                output.print_json(Figure(f"constant.{name}", value, ""))
            output.print_json(Figure("pool.hit_rate", self._pool, ""))
        else:
            _print_setup(setup, len(requests))

    def run(self, router: str) -> None:
        """One more router."""
        setup = msgspec.structs.replace(self._setup, router=router)
        answers = Replay(setup, self._requests).run()
        self._found[router] = summary(answers, setup.machine)
        first, second = (summary(half or answers, setup.machine) for half in halves(answers))
        self._halves[router] = first, second
        if setup.changes:
            calm = Replay(msgspec.structs.replace(setup, changes=()), self._requests).run()
            here, there = _window(answers, setup), _window(calm, setup)
            if here and there:
                self._after[router] = summary(here, setup.machine), summary(there, setup.machine)
        if self._form is Format.json:
            for figure in self._figures(router):
                output.print_json(figure)

    def _figures(self, router: str) -> Iterator[Figure]:
        base = None if router == BASELINE else self._found.get(BASELINE)
        yield from self._found[router].figures(router, base, self._pool)
        for at, part in enumerate(("first_half", "second_half")):
            than = self._halves[BASELINE][at] if base is not None else None
            yield from self._halves[router][at].figures(f"{router}.{part}", than, None)
        if router in self._after:
            here, calm = self._after[router]
            yield from here.figures(f"{router}.after_change", calm, calm.hit_rate)

    def end(self, svg: Path | None) -> None:
        """Tables and picture."""
        if svg is not None:
            svg.write_text(_picture(self._setup, self._found))
        if self._form is Format.json:
            return
        typer.echo(f"\nOne pool of {self._setup.nodes * self._setup.dram:,} blocks would hit {self._pool:.4f}.\n")
        _print("", self._found)
        for at, part in enumerate(("first half", "second half")):
            _print(f"\n{part} of the requests", {name: both[at] for name, both in self._halves.items()})
        if self._after:
            _print(f"\n{AFTER_S:.0f} s from the first change on", {name: both[0] for name, both in self._after.items()})
            _print("\nthe same time, had nothing happened", {name: both[1] for name, both in self._after.items()})


def _print(title: str, found: dict[str, Summary]) -> None:
    if title:
        typer.echo(title)
    columns = [
        "router",
        "hits",
        "mean s",
        "p50 s",
        "p95 s",
        "p99 s",
        "imbalance",
        "computed M",
        "dram",
        "nvme",
        "peer",
        "bucket",
        "$/M",
    ]
    rows = [
        [
            name,
            *(f"{value:.4f}" for value in (one.hit_rate,)),
            *(f"{value:.3f}" for value in (one.mean_s, one.p50_s, one.p95_s, one.p99_s)),
            f"{one.imbalance:.2f}",
            f"{one.computed_tokens / 1e6:.1f}",
            *(output.size(value) for value in (one.dram_bytes, one.nvme_bytes, one.peer_bytes, one.bucket_bytes)),
            f"{one.dollars:.4f}",
        ]
        for name, one in found.items()
    ]
    output.print_table(columns, rows)


def _setting(setup: Setup, requests: int, machine: str) -> Setting:
    return Setting(
        machine=machine,
        about=setup.machine.about,
        speedup=setup.speed,
        requests=requests,
        nodes=setup.nodes,
        dram=setup.dram,
        nvme=setup.nvme,
        policy=setup.policy,
        sharing=setup.sharing,
        bucket=setup.bucket,
    )


def _print_setup(setup: Setup, requests: int) -> None:
    on = {True: "yes", False: "no"}
    fields: dict[str, object] = {
        "requests": requests,
        "arrive": f"{setup.speed:g} times as fast as in the trace",
        "nodes": f"{setup.nodes} of {setup.dram:,} blocks in memory, {setup.nvme:,} on disk; {BLOCK_TOKENS} tokens each",
        "policy": setup.policy,
        "sharing": on[setup.sharing],
        "bucket": on[setup.bucket],
        "changes": ", ".join(f"{one.at_s:g} s: {one.node} {'joins' if one.joins else 'dies'}" for one in setup.changes) or "none",
        "machine": setup.machine.about,
        "told after": f"{TOLD_S} s; a death after {NOTICED_S} s",
        **{name: f"{value:.6g}" for name, value in _constants(setup.machine).items()},
    }
    output.print_fields(fields)


def _picture(setup: Setup, found: dict[str, Summary]) -> str:
    """Mean and p95, by those of the first router."""
    base = next(iter(found.values()))
    groups = [
        Group(
            f"{label} time to first token",
            None,
            [
                Bar(name, getattr(one, field) / getattr(base, field), f"{getattr(one, field):.3f} s", ours=name == "kvtier")
                for name, one in found.items()
            ],
        )
        for label, field in (("mean", "mean_s"), ("p95", "p95_s"))
    ]
    under = f"Shorter is faster. {setup.nodes} nodes of {setup.dram:,} blocks, arrivals x{setup.speed:g}; {setup.machine.about}"
    return draw("Routers on a trace, simulated", under, groups, whole=next(iter(found)))


def _known(what: str, names: Iterable[str], among: Iterable[str]) -> None:
    for name in names:
        if name not in among:
            raise Invalid(f"there is no {what} {name!r}", remedy=f"one of {', '.join(among)}")


def _window(answers: Sequence[Answer], setup: Setup) -> list[Answer]:
    begins = setup.changes[0].at_s
    return [one for one in answers if begins <= one.at_s < begins + AFTER_S]


def _changes(texts: Sequence[str], *, joins: bool) -> Iterator[Change]:
    for text in texts:
        if (match := _CHANGE.fullmatch(text)) is None:
            raise Invalid(f"{'--join' if joins else '--die'} {text}: this is no change", remedy="write SECONDS:NODE, as in 1200:n3")
        yield Change(float(match[1]), match[2], joins)


def _check(setup: Setup) -> None:
    """Whoever dies is there, who joins is not, and one is left."""
    first = {f"n{number}" for number in range(setup.nodes)}
    there = set(first)
    for change in setup.changes:
        flag = f"{'--join' if change.joins else '--die'} {change.at_s:g}:{change.node}"
        if change.joins == (change.node in there):
            if change.joins:
                raise Invalid(f"{flag}: it is there already", remedy="give one that joins another name")
            why = "it is gone by then" if change.node in first else f"nodes are n0 to n{setup.nodes - 1}"
            raise Invalid(f"{flag}: {why}", remedy="let one die that is there then")
        (there.add if change.joins else there.remove)(change.node)
        if not there:
            raise Invalid(f"{flag}: it is the last node", remedy="leave one, or let another join before")


def _constants(machine: Machine) -> dict[str, float]:
    """By name, as `--constant` takes them."""
    found = dict[str, float]()
    for name, value in msgspec.to_builtins(machine).items():
        if name == "speeds":
            for inner, speed in value.items():
                found |= (
                    {f"{inner}.{last}": number for last, number in speed.items()} if isinstance(speed, dict) else {inner: speed}
                )
        elif name != "about":
            found[name] = value
    return found


def _with(machine: Machine, constants: Sequence[str]) -> Machine:
    built, known = msgspec.to_builtins(machine), _constants(machine)
    for text in constants:
        name, _, number = text.partition("=")
        if name not in known:
            raise Invalid(f"there is no constant {name!r}", remedy=f"one of {', '.join(known)}")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not 0 < value < 1e18:
            raise Invalid(f"{text!r}: a constant is a number greater than 0", remedy="write it like token_s=0.00005")
        first, _, last = name.partition(".")
        if last:
            built["speeds"][first][last] = value
        elif name in built["speeds"]:
            built["speeds"][name] = value
        else:
            built[name] = int(value) if name == "token_bytes" else value
    return msgspec.convert(built, Machine)
