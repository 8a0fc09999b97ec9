"""The process of a node is a node and nothing else: how Python runs in it is set for that, and nobody else's process is touched."""

import subprocess
import sys

LOOP = """
import asyncio, gc, sys, weakref
from kvstore.server import loop

class Ring:
    pass

async def main():
    first = Ring()
    first.me, gone = first, weakref.ref(first)
    del first
    kept = [[] for _ in range(3_000)]
    print(gc.isenabled(), gc.get_threshold()[2] > 10, gone() is None, len(kept))

before = gc.get_threshold()
import kvstore.embedded
assert gc.get_threshold() == before
loop.run(main())
"""


def test_a_node_looks_less_often_for_old_cycles_and_still_frees_young_ones():
    told = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, check=True, timeout=60).stdout
    assert told.split() == ["True", "True", "True", "3000"]
