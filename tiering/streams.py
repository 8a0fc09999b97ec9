"""Memory of one device, and the queue of copies into it: CUDA's, or this host's, where every copy is over at once.

torch is imported by `open_device`, not by this module.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("tiering.device")
_REGISTER_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every context of this process


class Mark(Protocol):
    """A point in a queue of device work."""

    def hold_up(self) -> None:
        """What the caller's current stream does from now on waits for it. The host does not."""
        ...

    def wait(self) -> None:
        """The host waits for it, without the GIL."""
        ...

    def passed(self) -> bool:
        """Whether it is behind us."""
        ...


class Device(Protocol):
    """Memory, and one queue of copies. Any thread may call it; who copies sees to it that nobody else does.

    Attributes:
        name: As torch spells it: `cuda:0`, `cpu`.
    """

    name: str

    def allocate(self, nbytes: int) -> Tensor:
        """So many bytes, u8. Raises `RuntimeError` (torch's OutOfMemoryError is one) where there is no room."""
        ...

    def staging(self, nbytes: int) -> Tensor:
        """Host memory that copies leave from without the host waiting for them, where the system gives it."""
        ...

    def register(self, memory: Tensor) -> bool:
        """Make host memory such memory, for good; whether the system agreed."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of bytes from the host. `source` stays as it is until a later mark has passed."""
        ...

    def mark(self) -> Mark:
        """The end of what is queued here by now."""
        ...

    def in_use(self) -> Mark:
        """The end of what is queued on the caller's current stream: until then it may use what it was handed."""
        ...

    def after(self, mark: Mark) -> None:
        """What is queued here from now on waits for that mark."""
        ...

    def close(self) -> None:
        """Nothing is queued any more, and nothing is registered."""
        ...


def open_device(name: str) -> Device:
    """The device of that name: `cpu`, `cuda`, `cuda:1`.

    Raises:
        ValueError: There is none, or torch is not installed.
    """
    try:
        torch = import_module("torch")
    except ImportError as error:
        raise ValueError(f"device {name!r} needs torch") from error
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is unknown; write cpu, cuda or cuda:1") from error
    if device.type == "cpu":
        return HostDevice(torch)
    if device.type != "cuda":
        raise ValueError(f"device {name!r} is not supported; cuda devices are, and cpu")
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return CudaDevice(torch, torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index))


class _Passed:
    """Where nothing is queued, everything is behind us."""

    def hold_up(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def passed(self) -> bool:
        return True


class HostDevice:
    """This host's own memory, by the same calls."""

    def __init__(self, torch: Any) -> None:
        self.name = "cpu"
        self._torch = torch

    def allocate(self, nbytes: int) -> Tensor:
        """See `Device`."""
        found: Tensor = self._torch.empty(nbytes, dtype=self._torch.uint8)
        return found

    def staging(self, nbytes: int) -> Tensor:
        """See `Device`."""
        return self.allocate(nbytes)

    def register(self, memory: Tensor) -> bool:  # noqa: ARG002  the seam's signature; nothing need be done here
        """See `Device`."""
        return True

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Device`."""
        target.copy_(source)

    def mark(self) -> Mark:
        """See `Device`."""
        return _Passed()

    def in_use(self) -> Mark:
        """See `Device`."""
        return _Passed()

    def after(self, mark: Mark) -> None:
        """See `Device`."""

    def close(self) -> None:
        """See `Device`."""


class _Event:
    """A CUDA event, recorded."""

    def __init__(self, torch: Any, device: Any, stream: Any) -> None:
        self._torch, self._device = torch, device
        self.event = torch.cuda.Event(blocking=True)  # else a thread that waits for it spins
        self.event.record(stream)

    def hold_up(self) -> None:
        self._torch.cuda.current_stream(self._device).wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()

    def passed(self) -> bool:
        return bool(self.event.query())


class CudaDevice:
    """A CUDA device, and a stream of its own.

    Memory is taken while that stream is current: torch's allocator gives it to nobody else before what is queued there by then is
    over, and `after` has put behind the uses on other streams whatever is given back.
    """

    def __init__(self, torch: Any, device: Any) -> None:
        self.name = str(device)
        self._torch, self._device = torch, device
        self._stream = torch.cuda.Stream(device)
        self._registered: list[Tensor] = []

    def allocate(self, nbytes: int) -> Tensor:
        """See `Device`."""
        with self._torch.cuda.stream(self._stream):
            found: Tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, device=self._device)
        return found

    def staging(self, nbytes: int) -> Tensor:
        """See `Device`."""
        found: Tensor
        try:
            found = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)
        except RuntimeError as error:
            _log.warning("no pinned memory (%s): copies to %s hold the host up", error, self.name)
            found = self._torch.empty(nbytes, dtype=self._torch.uint8)
        return found

    def register(self, memory: Tensor) -> bool:
        """See `Device`. Memory that somebody else has registered counts as refused: they may unregister it under our copies."""
        with self._torch.cuda.device(self._device):
            answer = int(self._torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _REGISTER_PORTABLE))
            if answer:
                _log.warning("CUDA does not register the arena (error %d): blocks go through a pinned buffer", answer)
                self._forget_the_error()
                return False
        self._registered.append(memory)
        return True

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Device`."""
        with self._torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """See `Device`."""
        return _Event(self._torch, self._device, self._stream)

    def in_use(self) -> Mark:
        """See `Device`."""
        return _Event(self._torch, self._device, self._torch.cuda.current_stream(self._device))

    def after(self, mark: Mark) -> None:
        """See `Device`."""
        assert isinstance(mark, _Event)
        self._stream.wait_event(mark.event)

    def close(self) -> None:
        """See `Device`."""
        try:
            self._stream.synchronize()
        except RuntimeError as error:  # the device has failed, and reads nothing any more
            _log.warning("closing %s: %s", self.name, error)
        with self._torch.cuda.device(self._device):
            while self._registered:
                answer = int(self._torch.cuda.cudart().cudaHostUnregister(self._registered.pop().data_ptr()))
                if answer:
                    _log.warning("CUDA does not unregister the arena (error %d)", answer)
                    self._forget_the_error()

    def _forget_the_error(self) -> None:
        """A refused call stays the runtime's last error, and the next kernel would be blamed for it: let that be one of ours."""
        try:
            self._torch.zeros(1, device=self._device)
        except RuntimeError:
            _log.debug("the error of a refused registration was taken back")
