"""Blocks from another node over TCP, verified, beside the bare transfer of the same bytes, in one run; each side is a process.

Every round measures every case once, in random order, each after an untimed pass of itself; the first round does not count. A
ratio is the median over rounds of ours by the baseline in the same round. A stream is a reader that wants a session, and one bare
connection. `sendfile` and `send` verify nothing; `verified` is `send` whose readers digest what comes, a tensor's bytes at a time,
and do nothing else: what a node can come up to that shows no byte before it is verified. One reader of ours has two connections, as
`verified` then.

    python benchmarks/peer.py [--rounds 5] [--sizes 2,32] [--streams 1,8] [--peers KIT] [--tls FOLDER] [--slow]

With `--tls` nodes show each other node.pem of that folder, made for 127.0.0.1 as docs/mesh.md says, with node.key and mesh.pem. The
bare `send` goes through TLS then, too, and `sendfile` does not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
import numpy as np
from _link import Link
from _workers import Worker
from blake3 import blake3

from kvstore import codec
from kvstore.clock import SystemClock
from kvstore.ids import BlockName, Namespace, Shard, chain
from kvstore.lifecycle.prestage import Turns
from kvstore.mesh.exchange import SLICE
from kvstore.mesh.link import Links
from kvstore.mesh.members import Member
from kvstore.mesh.peers import Peers
from kvstore.mesh.sockets import fill
from kvstore.mesh.supplier import PeerSettings
from kvstore.mesh.tls import PeerTls
from kvstore.repo import BlockWant, want
from kvstore.server import loop
from kvstore.server.peering import Peering
from kvstore.service.plane import Plane, TenantTiers
from kvstore.service.registry import Registry
from tiering import DramTier, Lease, Miss, Movers, Stack, StackSettings, Want

MIB: Final = 1 << 20
_SET: Final = 512  # MiB of each size: more than a cache holds
_SLOW: Final = 48  # MiB over the slow link
_RATE: Final = 100e6 / 8
_SHAPES: Final = {2: (16, 2, 64), 8: (32, 4, 64), 32: (32, 8, 128)}  # layers, heads, their size; 256 tokens in bf16
_SEED: Final = 7


def namespace(mib: int) -> Namespace:
    """Blocks of so many MiB."""
    layers, heads, dim = _SHAPES[mib]
    return Namespace(model="benchmark", revision="1", layers=layers, kv_heads=heads, head_dim=dim, dtype="BF16", block_tokens=256)


def wants(mib: int) -> list[Want]:
    """The blocks that the other node has."""
    fields = namespace(mib)
    links = chain(fields, np.arange(_SET // mib * fields.block_tokens, dtype=np.uint32))
    return [want(fields, BlockName(fields.id, Shard(), link.prefix_id, link.tokens)) for link in links]


class _Directory:
    """The other node has everything."""

    def __init__(self, member: Member | None) -> None:
        self._members = () if member is None else (member,)

    def members(self) -> Sequence[Member]:
        return self._members

    async def locate(self, keys: Sequence[bytes]) -> list[tuple[Member, ...]]:
        return [self._members] * len(keys)

    def added(self, keys: Sequence[bytes]) -> None:
        pass

    def dropped(self, keys: Sequence[bytes]) -> None:
        pass

    def wrong(self, member: Member, keys: Sequence[bytes]) -> None:
        print(f"{member.node} has not {len(keys)} blocks that it should have", file=sys.stderr)


class _Node:
    """As much of a node as moves blocks between peers."""

    def __init__(self, dram: DramTier, stack: Stack, peers: Peers, tiers: Mapping[str, TenantTiers], plane: Plane) -> None:
        self.dram, self.stack, self.peers, self.tiers, self.plane = dram, stack, peers, tiers, plane

    @classmethod
    @asynccontextmanager
    async def open(
        cls, name: str, member: Member | None, movers: Movers, sizes: int, tls: PeerTls | None = None
    ) -> AsyncIterator[_Node]:
        clock = SystemClock()
        async with AsyncExitStack() as life:
            dram = await life.enter_async_context(DramTier.open("dram", (sizes * _SET + 128) * MIB, movers))
            everywhere = ["0.0.0.0/0"]  # the slow link is in a network of its own
            links = await life.enter_async_context(Links.open(networks=everywhere, tls=tls))
            patient = PeerSettings(patience_s=60, longest_s=600)  # all is asked of the one that there is
            peers = await life.enter_async_context(Peers.open(name, _Directory(member), links, clock, patient, placement=False))
            lent = StackSettings(lenders=frozenset({"peer"}))
            stack = await life.enter_async_context(Stack.open(dram, None, [peers] if member else [], lent))
            tiers = {"default": TenantTiers(dram, stack, ())}
            plane = Plane(tiers, Registry(None), None, clock, movers, Turns(speculative=1))
            life.push_async_callback(plane.aclose)
            yield cls(dram, stack, peers, tiers, plane)


# --- the process that has the blocks ---


async def serve(sizes: Sequence[int], listen: str, networks: tuple[str, ...], tls: PeerTls | None) -> None:
    """Until its input ends."""
    async with Movers.open() as movers, _Node.open("there", None, movers, len(sizes)) as node:
        places = {mib: [_publish(node, each, index) for index, each in enumerate(wants(mib))] for mib in sizes}
        host = listen.rpartition(":")[0]
        raw = socket.create_server((host, 0))
        secured = socket.create_server((host, 0))
        for listener, shows in ((raw, None), (secured, tls)):
            threading.Thread(target=_serve_raw, args=(listener, node.dram, shows), daemon=True).start()
        opening = Peering.open(
            node.plane, node.tiers, movers, SystemClock(), lambda _: False, listen=listen, networks=networks, tls=tls
        )
        async with opening as peering:
            ports = {"port": peering.address[1], "raw": raw.getsockname()[1], "secured": secured.getsockname()[1]}
            where = {**ports, "places": places}
            print(msgspec.json.encode(where).decode(), flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                if line.strip() == "counts":
                    print(msgspec.json.encode(peering.counts).decode(), flush=True)


def _publish(node: _Node, each: Want, index: int) -> tuple[int, int]:
    """A block that compresses as real keys and values do. Where it lies."""
    slot = node.dram.reserve(each)
    assert not isinstance(slot, Miss)
    ref = each.ref
    assert isinstance(ref, BlockWant)
    plan = codec.layout(ref.namespace, ref.name.shard, ref.name.tokens)
    slot.view[plan.header_bytes :] = _payload(plan.payload_bytes, index % 4)
    codec.seal(slot.view, ref.name, ref.namespace)
    offset = slot.offset
    slot.commit().release()
    return offset, each.size


@lru_cache(maxsize=8)
def _payload(nbytes: int, seed: int) -> memoryview:
    values = np.random.default_rng(seed).standard_normal(nbytes // 2, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).data.cast("B")


def _serve_raw(listener: socket.socket, dram: DramTier, tls: PeerTls | None) -> None:
    """The bare transfer: 24 bytes say how, from where and how much."""
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            sock = tls.server.wrap_socket(sock, server_side=True)
        threading.Thread(target=_answer_raw, args=(sock, dram), daemon=True).start()


def _answer_raw(sock: socket.socket, dram: DramTier) -> None:
    asked = bytearray(24)
    while fill(sock, memoryview(asked)) == 24:
        copies, offset, nbytes = (int.from_bytes(asked[at : at + 8], "little") for at in (0, 8, 16))
        if copies:
            sock.sendall(dram.memory[offset : offset + nbytes])
            continue
        while nbytes:
            sent = os.sendfile(sock.fileno(), dram.fd, offset, nbytes)
            offset, nbytes = offset + sent, nbytes - sent


# --- the process that wants them ---


class Client:
    """Measures one case at a time: seconds, and CPU-seconds of this process."""

    def __init__(self, node: _Node, host: str, where: Mapping[str, object], tls: PeerTls | None) -> None:
        self._node, self._tls = node, tls
        self._raw, self._secured = ((host, int(str(where[name]))) for name in ("raw", "secured"))
        places = msgspec.convert(where["places"], dict[int, list[tuple[int, int]]], strict=False)
        self.places = places
        self._wants = {mib: wants(mib) for mib in places}

    async def ours(self, mib: int, streams: int) -> None:
        """Readers side by side, each of a part of the blocks, through the hierarchy."""
        every = self._wants[mib]
        await asyncio.gather(*(self._read(every[part::streams]) for part in range(streams)))
        self._node.dram.discard_many([each.key for each in every])

    async def _read(self, part: Sequence[Want]) -> None:
        found = await self._node.stack.get_many(part)
        assert all(isinstance(got, Lease) for got in found), found[-1]
        for got in found:
            if isinstance(got, Lease):
                got.release()

    async def raw(self, mib: int, streams: int, *, copies: bool, digested: bool = False) -> None:
        """As many connections, each of a part of the blocks, all asked for at once, into this node's memory."""
        places = self.places[mib]
        layers, *_ = _SHAPES[mib]
        digested_by = mib * MIB // (2 * layers) if digested else 0
        with ThreadPoolExecutor(streams) as threads:
            works = [
                asyncio.wrap_future(threads.submit(self._fetch, places[part::streams], copies, digested_by))
                for part in range(streams)
            ]
            await asyncio.gather(*works)

    def _fetch(self, places: Sequence[tuple[int, int]], copies: bool, digested_by: int) -> None:
        tls = self._tls if copies else None
        with ExitStack() as closing:
            sock = closing.enter_context(socket.create_connection(self._secured if tls else self._raw))
            if tls is not None:
                sock = closing.enter_context(tls.client.wrap_socket(sock))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ask = [number.to_bytes(8, "little") for place in places for number in (int(copies), *place)]
            sock.sendall(b"".join(ask))
            memory = self._node.dram.memory
            for offset, nbytes in places:
                for at in range(offset, offset + nbytes, SLICE):
                    end = min(at + SLICE, offset + nbytes)
                    assert fill(sock, memory[at:end]) == end - at
                    for first in range(at, end, digested_by) if digested_by else ():
                        blake3(memory[first : min(first + digested_by, end)]).digest()

    async def lone(self, mib: int, times: list[float]) -> None:
        """Blocks one after the other."""
        for each in self._wants[mib][:64]:
            begun = time.perf_counter()
            await self._read([each])
            times.append(time.perf_counter() - begun)
        self._node.dram.discard_many([each.key for each in self._wants[mib]])


async def _timed(work: Callable[[], Awaitable[None]], nbytes: int) -> dict[str, float]:
    await work()
    cpu, begun = time.process_time(), time.perf_counter()
    await work()
    took = time.perf_counter() - begun
    return {"gbps": nbytes / took / 1e9, "cpu_s_per_gb": (time.process_time() - cpu) / nbytes * 1e9}


@contextmanager
def _there(*more: str, prefix: Sequence[str] = ()) -> Iterator[tuple[subprocess.Popen[str], dict[str, object]]]:
    command = [*prefix, sys.executable, str(Path(__file__)), "--serve", *more]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield process, msgspec.json.decode(process.stdout.readline(), type=dict[str, object])
    finally:
        process.stdin.close()
        process.wait()


async def fast(sizes: Sequence[int], streams: Sequence[int], rounds: int, kit: Path | None, folder: str) -> None:
    """At loopback speed."""
    order = random.Random(_SEED)
    with ExitStack() as lifetime:
        process, where = lifetime.enter_context(_there("--sizes", ",".join(map(str, sizes)), "--tls", folder))
        mooncake = _mooncake(kit, lifetime) if kit else None
        async with Movers.open() as movers:
            member = Member("there", 1, "127.0.0.1", int(str(where["port"])))
            tls = _tls(folder)
            async with _Node.open("here", member, movers, len(sizes), tls) as node:
                client = Client(node, "127.0.0.1", where, tls)
                for mib in sizes:
                    await _measure(client, mib, streams, rounds, order, mooncake)
        print(msgspec.json.encode({"name": "peer_coded_at_loopback", "counts": _counts(process)}).decode(), flush=True)


async def _measure(
    client: Client, mib: int, streams: Sequence[int], rounds: int, order: random.Random, mooncake: Worker | None
) -> None:
    nbytes = sum(size for _, size in client.places[mib])
    cases: dict[str, Callable[[], Awaitable[None]]] = {}
    for count in streams:
        cases[f"peer_{count}"] = partial(client.ours, mib, count)
        cases[f"sendfile_{count}"] = partial(client.raw, mib, count, copies=False)
        cases[f"send_{count}"] = partial(client.raw, mib, count, copies=True)
        cases[f"verified_{count}"] = partial(client.raw, mib, max(2, count), copies=True, digested=True)
    others = [case for case in (mooncake.cases if mooncake else []) if case.endswith("get_into")]
    seen: dict[str, list[Mapping[str, float]]] = {name: [] for name in [*cases, *others]}
    lone: list[float] = []
    for turn in range(rounds + 1):
        for name in order.sample([*seen], len(seen)):
            if name in cases:
                result: Mapping[str, float] = await _timed(cases[name], nbytes)
            else:
                assert mooncake is not None
                await asyncio.to_thread(mooncake.measure, name, mib * MIB)
                answer = await asyncio.to_thread(mooncake.measure, name, mib * MIB)
                result = {key: float(value) for key, value in answer.items() if isinstance(value, int | float)}
            if turn:
                seen[name].append(result)
        if turn:
            await client.lone(mib, lone)
    for count in streams:
        ours = seen[f"peer_{count}"]
        for base, target in (("sendfile", 0.8), ("send", 0.0), ("verified", 0.0)):
            _tell(f"peer_{count}", mib, ours, f"{base}_{count}", seen[f"{base}_{count}"], target=target)
        for name in others:
            _tell(f"peer_{count}", mib, ours, name, seen[name])
    lone.sort()
    line = {"name": "peer_lone", "mib": mib, "unit": "ms", "p50": round(lone[len(lone) // 2] * 1e3, 3)}
    print(
        msgspec.json.encode({**line, "p99": round(lone[len(lone) * 99 // 100] * 1e3, 3), "samples": len(lone)}).decode(), flush=True
    )


def _tell(
    name: str, mib: int, ours: Sequence[Mapping[str, float]], base: str, others: Sequence[Mapping[str, float]], target: float = 0.0
) -> None:
    ratio = statistics.median(one["gbps"] / other["gbps"] for one, other in zip(ours, others, strict=True))
    line: dict[str, object] = {"name": name, "mib": mib, "unit": "GB/s"}
    for prefix, results in (("", ours), ("baseline_", others)):
        for key, short in (("gbps", "value"), ("cpu_s_per_gb", "cpu_s_per_gb")):
            line[(prefix + short) if short != "value" or not prefix else f"{prefix}value"] = round(
                statistics.median(result[key] for result in results), 3
            )
    line |= {"baseline": base, "ratio": round(ratio, 3), "rounds": len(ours)}
    if target:
        line |= {"target": target, "met": ratio >= target}
    print(msgspec.json.encode(line).decode(), flush=True)


def _mooncake(kit: Path, lifetime: ExitStack) -> Worker:
    packages = Path(os.environ.get("PEERS", ".peers")).resolve()
    env = {**os.environ, "PEERS": str(packages), "PYTHONPATH": str(kit), "MC_MODE": "remote"}
    python = packages / "mooncake" / "bin" / "python"
    errors = lifetime.enter_context((packages / "logs" / "kvtier.log").open("ab"))
    return lifetime.enter_context(Worker.start("mcr", [python, kit / "w_mooncake.py", "--worker"], env, errors))


def _counts(process: subprocess.Popen[str]) -> dict[str, int]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("counts\n")
    process.stdin.flush()
    return msgspec.json.decode(process.stdout.readline(), type=dict[str, int])


# --- a slow link ---


@contextmanager
def _slow() -> Iterator[tuple[str, str, tuple[str, ...], Sequence[str]]]:
    """100 Mbit/s: a veth to another network namespace, with tbf, where the system lets us; else a proxy is to do it."""
    name, mine, theirs = f"kvtier{os.getpid()}", "10.201.7.1", "10.201.7.2"
    commands = [
        f"ip netns add {name}",
        f"ip link add kv{os.getpid()} type veth peer name eth0 netns {name}",
        f"ip addr add {mine}/24 dev kv{os.getpid()}",
        f"ip link set kv{os.getpid()} up",
        f"ip -n {name} addr add {theirs}/24 dev eth0",
        f"ip -n {name} link set eth0 up",
        f"ip -n {name} link set lo up",
        f"ip netns exec {name} tc qdisc add dev eth0 root tbf rate 100mbit burst 64kb latency 100ms",
    ]
    made = bool(shutil.which("ip") and shutil.which("tc")) and all(
        subprocess.run(each.split(), stderr=subprocess.DEVNULL, check=False).returncode == 0 for each in commands
    )
    try:
        yield (
            ("tbf", theirs, ("10.201.7.0/24",), ["ip", "netns", "exec", name])
            if made
            else ("proxy", "127.0.0.1", ("127.0.0.0/8",), [])
        )
    finally:
        if shutil.which("ip"):
            subprocess.run(["ip", "link", "del", f"kv{os.getpid()}"], stderr=subprocess.DEVNULL, check=False)
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


async def slow() -> None:
    """Two readings of the same number of blocks over 100 Mbit/s: while the link is found out, and after."""
    with ExitStack() as lifetime:
        how, host, networks, prefix = lifetime.enter_context(_slow())
        listen = ["--sizes", "2", "--listen", f"{host}:0", "--networks", ",".join(networks)]
        process, where = lifetime.enter_context(_there(*listen, prefix=prefix))
        port = int(str(where["port"]))
        if how == "proxy":
            link = lifetime.enter_context(Link.open(f"http://{host}:{port}"))
            link.rate = _RATE
            port = urlsplit(link.endpoint).port or 0
        async with Movers.open() as movers, _Node.open("here", Member("there", 1, host, port), movers, 1) as node:
            every = wants(2)
            for turn in range(2):
                part = every[turn * _SLOW // 2 : (turn + 1) * _SLOW // 2]
                begun, before = time.perf_counter(), _counts(process)
                found = await node.stack.get_many(part)
                took = time.perf_counter() - begun
                assert all(isinstance(got, Lease) for got in found), found[-1]
                after = _counts(process)
                nbytes = sum(each.size for each in part)
                line: dict[str, object] = {"name": "peer_100mbit", "turn": turn, "link": how, "unit": "MB/s"}
                line |= {"value": round(nbytes / took / 1e6, 2), "baseline": "the bare link", "baseline_value": _RATE / 1e6}
                line |= {"ratio": round(nbytes / took / _RATE, 3)}
                line |= {kind: after.get(kind, 0) - before.get(kind, 0) for kind in ("coded", "raw")}
                print(msgspec.json.encode(line).decode(), flush=True)
                for got in found:
                    if isinstance(got, Lease):
                        got.release()


def _tls(folder: str) -> PeerTls | None:
    return PeerTls(*(f"{folder}/{name}" for name in ("node.pem", "node.key", "mesh.pem"))) if folder else None


def main() -> None:
    """One process wants, the other has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="2,32", help="MiB")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--peers", type=Path, help="the kit with workers for other systems; PEERS says where its packages are")
    parser.add_argument("--tls", default="", metavar="FOLDER", help="TLS between the nodes")
    parser.add_argument("--slow", action="store_true", help="over 100 Mbit/s")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--listen", default="127.0.0.1:0", help=argparse.SUPPRESS)
    parser.add_argument("--networks", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    sizes = [int(text) for text in asked.sizes.split(",")]
    if asked.serve:
        loop.run(serve(sizes, asked.listen, tuple(filter(None, asked.networks.split(","))), _tls(asked.tls)))
    elif asked.slow:
        loop.run(slow())
    else:
        loop.run(fast(sizes, [int(text) for text in asked.streams.split(",")], asked.rounds, asked.peers, asked.tls))


if __name__ == "__main__":
    main()
