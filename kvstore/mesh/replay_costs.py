"""What a replay takes a node to be. Derived from data sheets, not measured: each figure stands beside its origin."""

from __future__ import annotations

from typing import Final

import msgspec

from kvstore.mesh.price import Speed, Speeds

_USED: Final = 0.5  # of the peak of matrix multiplication
_H100: Final = 989e12 * _USED  # FLOP/s in bf16, dense


class Machine(msgspec.Struct, frozen=True):
    """A node with its model.

    Attributes:
        about: What it is.
        speeds: See `kvstore.mesh.price`.
        token_bytes: Of KV of one token.
        hour: Dollars of an hour of its GPUs.
    """

    about: str
    speeds: Speeds
    token_bytes: int
    hour: float


MACHINES: Final = {
    # 8.03e9 parameters, 2 FLOP each; attention 4 FLOP x 32 layers x 4,096; KV 2 x 32 layers x 8 heads x 128 x 2 bytes.
    "8b-h100": Machine(
        "Llama 3.1 8B in bf16 on one H100 SXM at half its peak; 100 Gbit/s between nodes",
        Speeds(
            token_s=2 * 8.03e9 / _H100,
            position_s=4 * 32 * 4096 / _H100,
            dram=Speed(0.000_2, 40e9),  # PCIe 5.0 x16, of 63e9
            nvme=Speed(0.001, 6e9),
            peer=Speed(0.001, 10e9),  # of 12.5e9
            bucket=Speed(0.05, 2e9),
        ),
        token_bytes=131_072,
        hour=3.0,
    ),
    # 70.6e9 parameters; attention 4 FLOP x 80 layers x 8,192; KV 2 x 80 layers x 8 heads x 128 x 2 bytes.
    "70b-4xh100": Machine(
        "Llama 3.1 70B in bf16 on four H100 SXM at half their peak; 100 Gbit/s between nodes",
        Speeds(
            token_s=2 * 70.6e9 / (4 * _H100),
            position_s=4 * 80 * 8192 / (4 * _H100),
            dram=Speed(0.000_2, 100e9),  # four links, of one memory
            nvme=Speed(0.001, 12e9),
            peer=Speed(0.001, 10e9),
            bucket=Speed(0.05, 2e9),
        ),
        token_bytes=327_680,
        hour=12.0,
    ),
}
