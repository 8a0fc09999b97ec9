"""The device tier keeps the contract of tiers, seen through a lens that brings its bytes back to the host."""

from contextlib import asynccontextmanager

import pytest

from tiering import Lease, Movers
from tiering.device import DeviceTier
from tiering.device_lease import DeviceLease
from tiering.testing import TierContract

torch = pytest.importorskip("torch", reason="the `torch` extra is not installed")


class OnHost:
    """A tier of plain leases: copies of what lies on the device."""

    def __init__(self, tier):
        self._tier = tier

    def __getattr__(self, name):
        return getattr(self._tier, name)

    async def get_many(self, wants):
        return [self._copied(got) for got in await self._tier.get_many(wants)]

    def _copied(self, got):
        if not isinstance(got, DeviceLease):
            return got
        got.wait()
        return Lease(got.key, memoryview(got.tensor.cpu().numpy().tobytes()), -1, got.release, got.source)


class TestDeviceOnCpu(TierContract):
    device = "cpu"

    @asynccontextmanager
    async def open(self, limit):
        async with Movers.open() as movers, DeviceTier.open("device", limit, self.device, movers.run) as tier:
            yield OnHost(tier)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
class TestDeviceOnCuda(TestDeviceOnCpu):
    device = "cuda:0"
