"""The words of requests and answers that more than one of them uses, and their bounds."""

from __future__ import annotations

from typing import Final, Literal

Durability = Literal["dram", "nvme", "bucket"]
Tier = Literal["dram", "nvme", "bucket"]
Target = Literal["device", "dram", "nvme", "bucket"]  # of a restore
Priority = Literal["interactive", "speculative"]
Event = Literal["tool_start", "tool_return", "resume_at", "final"]
MAX_BLOCKS: Final = 65_536  # of one session, as requests may name them
MAX_TOKENS: Final = 16_777_216
MAIN: Final = "main"
