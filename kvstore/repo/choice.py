"""Which codec a new block object gets: the one that was set, or the one that what was measured speaks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from kvstore.clock import Clock
from kvstore.codec import Codec

CodecSetting = Literal["raw", "zstd", "bp-zstd", "auto"]
Reason = Literal["set", "unmeasured", "faster", "near"]

_CODED: Final[Codec] = "bp-zstd"
_SAMPLE_BYTES: Final = 16 << 20  # of one look at a rate
_SAMPLE_S: Final = 0.05
WEIGHT: Final = 0.3  # of the newest look
MARGIN: Final = 1.25  # the other choice must be so much faster: near the balance, switching would be for nothing
_STAY: Final = 8  # objects between two switches, at least
_PROBE: Final = 64  # objects from one that is coded only to see how fast that is now
FIRST_RATIO: Final = 0.7  # stored by raw, until measured: real KV in bf16 gives 0.69


class Rate:
    """Bytes a second of something that several do at once, over the time in which anybody does it.

    Attributes:
        value: 0 until enough was seen.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._under_way = 0
        self._since = self._busy = 0.0
        self._bytes = 0
        self.value = 0.0

    @contextmanager
    def moving(self, nbytes: int) -> Iterator[None]:
        """For the length of the block so many bytes are under way; what fails counts for nothing but its time."""
        self._turn(1)
        try:
            yield
            self._bytes += nbytes
        finally:
            self._turn(-1)
            if self._bytes >= _SAMPLE_BYTES and self._busy >= _SAMPLE_S:
                seen = self._bytes / self._busy
                self.value = seen if not self.value else self.value + WEIGHT * (seen - self.value)
                self._bytes, self._busy = 0, 0.0

    def _turn(self, one: int) -> None:
        now = self._clock.monotonic()
        if self._under_way:
            self._busy += now - self._since
        self._since = now
        self._under_way += one


class CodecChoice:
    """Picks a codec for each object.

    With `auto`: coding and sending overlap, so of raw bytes a second, raw objects get what the link carries, and coded ones the
    smaller of what the codec takes in and what the link carries of its results. Starts raw, and stays while nothing is measured.

    Args:
        setting: A codec, or `auto`.
        clock: Measures.

    Attributes:
        link: Bytes a second that PUTs carry.
        coding: Raw bytes a second that the codec takes in.
        current: What most objects get now.
        switched: How often that changed.
        reason: What speaks for it: it was `set`; so far `unmeasured`; `faster`, as measured; the other is, but too little (`near`).
        why: The same with its numbers, for people.
        ratio: Stored by raw bytes of what was coded.
    """

    def __init__(self, setting: CodecSetting, clock: Clock) -> None:
        self._auto = setting == "auto"
        self.current: Codec = "raw" if setting == "auto" else setting
        self.link, self.coding = Rate(clock), Rate(clock)
        self.switched = 0
        self.reason: Reason = "unmeasured" if self._auto else "set"
        self.why = "nothing is measured yet" if self._auto else "set"
        self.ratio = FIRST_RATIO
        self._objects = self._last_switch = 0

    def pick(self) -> Codec:
        """For one object."""
        if not self._auto:
            return self.current
        self._objects += 1
        if self._objects - self._last_switch > _STAY:
            self._weigh()
        if self.current == "raw" and self.link.value and (not self.coding.value or self._objects % _PROBE == 0):
            return _CODED
        return self.current

    def coded(self, raw: int, stored: int) -> None:
        """What became of an object's bytes."""
        self.ratio += WEIGHT * (stored / raw - self.ratio)

    def _weigh(self) -> None:
        link, coding = self.link.value, self.coding.value
        if not link or not coding:
            return
        coded = min(coding, link / self.ratio)
        faster: Codec = _CODED if coded > link else "raw"
        margin = max(coded, link) / min(coded, link)
        if faster != self.current and margin >= MARGIN:
            self.current, self._last_switch = faster, self._objects
            self.switched += 1
        self.reason = "faster" if faster == self.current else "near"
        said = f"the link carries {link / 1e6:.0f} MB/s, the codec takes in {coding / 1e6:.0f} and keeps {self.ratio:.2f} of them"
        verdict = f"{faster} is {margin:.2f}x as fast" if margin > 1.005 else "both are as fast"
        self.why = f"{said}: {verdict}" + ("" if faster == self.current else f", too little to leave {self.current}")
