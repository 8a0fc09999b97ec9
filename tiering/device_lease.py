"""What the device tier hands out: a value in the device's memory, there or on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from tiering.device_pool import Pool, Value
from tiering.streams import Mark

if TYPE_CHECKING:
    pass


class DeviceLease:
    """A value that stays where it is until released. Its bytes may still be arriving: `wait` first.

    Attributes:
        key: The value's key.
        size: Length in bytes.
        source: Name of the tier that had it when it was asked for.
        tensor: The bytes, u8 [size], on the device. Do not write there.
    """

    __slots__ = ("_pool", "_value", "key", "size", "source", "tensor")

    def __init__(self, pool: Pool, value: Value, source: str) -> None:
        self._pool = pool
        self._value: Value | None = value
        self.key, self.size, self.tensor, self.source = value.key, value.size, value.cargo.tensor, source

    @property
    def value(self) -> Value:
        """Its tier's view of it. Raises `ValueError` after the release."""
        if self._value is None:
            raise ValueError("this lease was released")
        return self._value

    @property
    def here(self) -> bool:
        """Whether others find it, too. Raises `ValueError` after the release."""
        return self.value.state == "here"

    @property
    def coming(self) -> bool:
        """Whether it is leased, and some of it is not queued yet."""
        return self._value is not None and not self._value.cargo.complete

    async def arrived(self, part: int = -1) -> bool:
        """Until a part and all before are queued: then `wait` may be called for it. On the loop of the tier.

        Returns:
            False where the value is lost, that is, did not come whole: also what came before is not to be used any more.

        Raises:
            ValueError: It was released.
        """
        value = self.value
        while value.state == "coming" and value.cargo.mark(part) is None:
            value.changed.clear()
            await value.changed.wait()
        return value.state != "lost"

    def wait(self, part: int = -1) -> None:
        """What the caller's current stream does from now on waits until a part (by default the last), and all before, is there.

        The host goes on at once.

        Raises:
            ValueError: It was released, or the part is not queued yet (`arrived`).
        """
        self._mark(part).hold_up()

    def synchronize(self, part: int = -1) -> None:
        """The host waits for it. Raises as `wait`."""
        self._mark(part).wait()

    def release(self) -> None:
        """Let go, once the work that uses it is queued on the current stream. A second call does nothing."""
        value, self._value = self._value, None
        if value is not None:
            self._pool.release(value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _mark(self, part: int) -> Mark:
        value = self.value
        mark = value.cargo.mark(part) if value.state != "lost" else None
        if mark is None:
            raise ValueError(f"part {part} is not on its way: wait for it to have arrived")
        return mark
