"""Room on the disk: the slab of the disk tier is written in full when it is made, so that there must be enough for it before."""

from __future__ import annotations

from pathlib import Path
from shutil import disk_usage
from typing import Final

import msgspec

from kvstore.errors import Invalid

_OVERHEAD: Final = 8  # an eighth on top: headers and fragmentation (a sixteenth), the index (up to a thirty-second), and a margin
_MARGIN: Final = 64 << 20


class Room(msgspec.Struct, frozen=True):
    """What a disk tier of one size finds at its path.

    Attributes:
        needed: Bytes, index and a margin included.
        free: Bytes that this user may still take.
        held: Bytes that an earlier life of the tier takes already.
        made: Whether its slab has that size already: then it is there, however full the disk is by now.
    """

    needed: int
    free: int
    held: int
    made: bool

    @property
    def enough(self) -> bool:
        """Whether it fits."""
        return self.made or self.free + self.held >= self.needed


def room(path: Path, size: int) -> Room:
    """Look at a disk. Folders that do not exist yet are looked for upwards. Raises `OSError`."""
    path = path.absolute()
    place = next(folder for folder in (path, *path.parents) if folder.exists())  # the node makes what is missing below it
    files = {entry.name: entry.stat() for entry in path.iterdir() if entry.is_file()} if place == path else {}
    return Room(
        needed=size + size // _OVERHEAD + _MARGIN,
        free=disk_usage(place).free,
        held=sum(found.st_blocks * 512 for found in files.values()),
        made="slab" in files and files["slab"].st_size >= size,
    )


def refuse_more_disk_than_there_is(path: Path, size: int) -> None:
    """A disk tier that fills its disk takes everything else on that disk down with it.

    Raises:
        Invalid: `size` and what comes with it do not fit.
        OSError: The disk cannot be looked at.
    """
    found = room(path, size)
    if not found.enough:
        raise Invalid(
            f"nvme.size is {_mib(size)} and takes {_mib(found.needed)} with its index and a margin; "
            f"nvme.path {path} has {_mib(found.free)} free" + (f" and {_mib(found.held)} of its own" if found.held else ""),
            remedy="lower nvme.size, free space there, or choose another nvme.path",
        )


def _mib(count: int) -> str:
    return f"{count >> 20:,} MiB"
