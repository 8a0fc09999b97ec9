"""A device whose queue moves only when somebody waits for it, and tiers around it."""

import threading
from contextlib import asynccontextmanager

import torch

from tiering import DramTier, Movers
from tiering.device import DeviceTier
from tiering.streams import HostDevice
from tiering.testing import value_of, want_of

SIZE = 10_000


class SlowDevice(HostDevice):
    """A queue that moves only when somebody waits for it, and a diary of what was asked of it.

    `broken`: names of calls that raise, as those of a device that was lost do. `gate`: copies wait for it.
    """

    def __init__(self):
        super().__init__(torch)
        self.queue, self.done, self.diary, self.waited = [], 0, [], []
        self.moving = threading.Lock()
        self.broken, self.gate, self.entered = set(), None, threading.Event()
        self.registered = False

    def fail(self, name):
        if name in self.broken:
            raise RuntimeError("the device was lost")

    def register(self, memory):
        self.registered = True
        return True

    def close(self):
        self.move(len(self.queue))
        self.registered = False

    def move(self, end):
        with self.moving:
            while self.done < min(end, len(self.queue)):
                self.queue[self.done]()
                self.done += 1

    def copy(self, target, source):
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(20)
        self.fail("copy")
        self.diary.append(target.numel())
        self.queue.append(lambda: target.copy_(source))

    def mark(self):
        self.fail("mark")
        self.diary.append("mark")
        return SlowMark(self, len(self.queue))

    def in_use(self):
        self.fail("in_use")
        return SlowMark(self, len(self.queue) + 1)  # of somebody else's stream: not passed as far as we know

    def after(self, mark):
        self.fail("after")
        self.waited.append(mark)


class SlowMark:
    def __init__(self, device, at):
        self.device, self.at = device, at

    def hold_up(self):
        self.wait()

    def wait(self):
        self.device.fail("wait")
        self.device.move(self.at)

    def passed(self):
        self.device.fail("passed")
        return self.device.done >= self.at


def slow_device(monkeypatch):
    """The device that the next tier opens; every part is a copy of its own."""
    device = SlowDevice()
    monkeypatch.setattr("tiering.device.open_device", lambda name: device)
    monkeypatch.setattr("tiering.upload.PIECE", 1)
    return device


@asynccontextmanager
async def tiers(limit, device="cpu", *, registered=True, dram=1 << 22, **more):
    async with Movers.open() as movers, DramTier.open("dram", dram, movers) as memory:
        arena = memory.memory if registered else None
        async with DeviceTier.open("device", limit, device, movers.run, arena=arena, **more) as tier:
            yield memory, tier
        assert memory.leases == 0


async def leased(memory, *numbers, size=SIZE):
    wants = [want_of(n, size) for n in numbers]
    await memory.put_many([(want, memoryview(value_of(n, size))) for n, want in zip(numbers, wants, strict=True)])
    return list(zip(wants, memory.lease_many(wants), strict=True))


def bytes_of(lease):
    lease.wait()
    return lease.tensor.cpu().numpy().tobytes()
