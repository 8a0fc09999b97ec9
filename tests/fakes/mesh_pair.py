"""Two nodes of a mesh, of which the second reads from the first; and requests that are made by hand."""

import socket
from contextlib import asynccontextmanager

import msgspec
from fakes.mesh_peers import NS, introduce, mesh_node

from kvstore.mesh import frames
from kvstore.mesh.supplier import PeerSettings

PATIENT = PeerSettings(patience_s=30, through_s=30, longest_s=3600)  # no timing here but where it is the subject


@asynccontextmanager
async def pair(**how):
    """Two nodes that know each other; the second reads from the first."""
    async with mesh_node("a", **how.pop("first", {})) as a, mesh_node("b", **{"settings": PATIENT, **how}) as b:
        introduce(a, b)
        yield a, b


def only(node, wants, *members):
    """The directory says that these have them."""
    node.directory.others |= dict.fromkeys(members)
    node.directory.places |= {each.key: members for each in wants}


def idle(*nodes):
    return all(node.dram.leases == 0 and node.dram._budget.reserved == 0 for node in nodes)


def answer_frame(what, place, nbytes, extra=b""):
    return b"%010x\r\n" % (nbytes + 16) + frames._FRAME.pack(what, place, nbytes) + extra


def asking(node, wants, **more):
    """A connection on which these were asked for."""
    ask = frames.Ask(
        namespace=NS,
        shard="t0of1.p0of1.g0",
        prefixes=b"".join(bytes.fromhex(each.ref.name.prefix_id) for each in wants),
        tokens=tuple(each.ref.name.tokens for each in wants),
        **more,
    )
    sock = socket.create_connection(node.peering.address)
    sock.sendall(frames.request(frames.BLOCKS, "x", msgspec.msgpack.encode(ask)))
    return sock
