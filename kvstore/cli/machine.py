"""What a node needs of this machine, and whether it is there: memory, shared memory, disk, descriptors."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvstore.cli.output import size
from kvstore.config import Settings
from kvstore.service.room import room

Status = Literal["ok", "warn", "fail"]
NODE_BYTES: Final = 1 << 30  # the process itself, its encoders and what is under way to the store
ENGINES: Final = 4  # write windows to plan with
DESCRIPTORS: Final = 4096
_BLOCK: Final = 4096
_F_ADD_SEALS: Final = getattr(fcntl, "F_ADD_SEALS", 1033)
_F_SEAL_FUTURE_WRITE: Final = 0x0010
_MAX_SOCKET_PATH: Final = 107


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `remedy` says what to do unless `status` is `ok`."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine(settings: Settings, *, root: Path = Path("/")) -> Iterator[Finding]:
    """Everything that can be known without the store. `root` is where /proc and /sys are."""
    yield _memory(settings, root)
    yield _shared_memory()
    yield _huge_pages(root)
    yield from _disk(settings)
    yield from _socket(settings)
    yield _descriptors()


def memory_limit(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes this process and what it starts may still take, and by which limit: the machine's, or a control group's."""
    available = next(
        int(line.split()[1]) * 1024 for line in (root / "proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:")
    )
    least, by = available, "the machine"
    for limit_file, usage_file in _group_files(root):
        try:
            limit, used = limit_file.read_text().strip(), int(usage_file.read_text())
        except (OSError, ValueError):
            continue
        if limit.isdigit() and int(limit) - used < least:
            least, by = max(0, int(limit) - used), f"control group {limit_file.parent}"
    return least, by


def _group_files(root: Path) -> Iterator[tuple[Path, Path]]:
    """(limit, usage) of every memory control group around this process, of both versions; those that do not exist included."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder / names[0], folder / names[1]
            if folder == top:
                break


def _memory(settings: Settings, root: Path) -> Finding:
    arenas, windows = settings.dram.size, ENGINES * settings.dram.window  # tenants share dram.size out among them
    need = arenas + windows + NODE_BYTES
    least, by = memory_limit(root)
    parts = f"arenas {size(arenas)}, {ENGINES} engines {size(windows)}, the node {size(NODE_BYTES)}"
    detail = f"needs {size(need)} ({parts}); {by} has {size(least)} free"
    if arenas > least:
        return Finding(
            name="memory",
            status="fail",
            detail=detail,
            remedy="lower dram.size or raise the limit: the DRAM tier is shared memory, is filled at start and counts in full",
        )
    if need > least:
        return Finding(
            name="memory",
            status="warn",
            detail=detail,
            remedy="lower dram.size or raise the limit, or expect to be killed under load",
        )
    return Finding(name="memory", status="ok", detail=detail)


def _shared_memory() -> Finding:
    name = "shared memory"
    try:
        descriptor = os.memfd_create("kvtier-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Finding(
            name=name,
            status="fail",
            detail=f"memfd_create: {error.strerror}",
            remedy="allow memfd_create: a seccomp profile or sandbox forbids it",
        )
    try:
        os.ftruncate(descriptor, _BLOCK)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    except OSError as error:
        return Finding(
            name=name,
            status="fail",
            detail=f"F_SEAL_FUTURE_WRITE: {error.strerror}",
            remedy="run Linux 5.1 or newer: without this seal an engine could write into another's blocks",
        )
    finally:
        os.close(descriptor)
    return Finding(name=name, status="ok", detail="memfd with F_SEAL_FUTURE_WRITE")


def _huge_pages(root: Path) -> Finding:
    setting = root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    try:
        chosen = setting.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        chosen = "unknown"
    if chosen in {"always", "within_size", "advise", "force"}:
        return Finding(name="huge pages", status="ok", detail=f"for shared memory: {chosen}")
    return Finding(
        name="huge pages",
        status="warn",
        detail=f"for shared memory: {chosen}",
        remedy=f"optional, for large arenas: echo advise > /{setting.relative_to(root)}",
    )


def _disk(settings: Settings) -> Iterator[Finding]:
    if not settings.nvme.path:
        yield Finding(
            name="disk",
            status="warn",
            detail="nvme.path is not set: no local disk tier",
            remedy="set nvme.path to a folder on a local disk: a restart then starts warm, and durability=nvme exists",
        )
        return
    path = Path(settings.nvme.path).absolute()
    place = next(folder for folder in (path, *path.parents) if folder.exists())  # the node makes what is missing below it
    try:
        found = room(path, settings.nvme.size)
    except OSError as error:
        yield Finding(
            name="disk",
            status="fail",
            detail=f"{path}: {error.strerror}",
            remedy="make it a folder that the node's user may write to, or choose another nvme.path",
        )
        return
    detail = f"{path}: {size(settings.nvme.size)} takes {size(found.needed)}, {size(found.free)} free, {size(found.held)} held"
    if not found.enough:
        yield Finding(
            name="disk",
            status="fail",
            detail=detail,
            remedy="lower nvme.size or free space: the slab is written in full at creation",
        )
    else:
        yield Finding(name="disk", status="ok", detail=detail)
    yield _direct_io(place)


def _direct_io(path: Path) -> Finding:
    """Whether a file there can be written past the page cache."""
    probe = path / f".kvtier-doctor-{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            with mmap.mmap(-1, _BLOCK) as block:
                os.pwrite(descriptor, block, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            return Finding(
                name="direct I/O",
                status="fail",
                detail=f"{path}: {error.strerror}",
                remedy="let the node's user write there, or choose another nvme.path",
            )
        return Finding(
            name="direct I/O",
            status="warn",
            detail=f"{path} refuses O_DIRECT; the buffered fallback takes several times the CPU",
            remedy="put nvme.path on ext4 or xfs on a local disk, not on tmpfs, overlay or a network file system",
        )
    finally:
        probe.unlink(missing_ok=True)
    return Finding(name="direct I/O", status="ok", detail=f"{path} takes O_DIRECT")


def _socket(settings: Settings) -> Iterator[Finding]:
    if not settings.node.socket:
        return
    path = Path(settings.node.socket)
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        yield Finding(
            name="socket",
            status="fail",
            detail=f"{path} has {len(os.fsencode(path))} bytes; the kernel takes {_MAX_SOCKET_PATH}",
            remedy="choose a shorter node.socket, such as /run/kvtier/node.sock",
        )
    elif not os.access(path.parent, os.W_OK):
        yield Finding(
            name="socket",
            status="fail",
            detail=f"{path.parent} is not there, or this user may not write to it",
            remedy=f"install -d -o {os.getuid()} {path.parent}",
        )
    else:
        yield Finding(name="socket", status="ok", detail=str(path))


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft:,} open files allowed (at most {hard:,})"
    if soft >= DESCRIPTORS:
        return Finding(name="open files", status="ok", detail=detail)
    return Finding(name="open files", status="warn", detail=detail, remedy=f"ulimit -n {DESCRIPTORS}, or LimitNOFILE= in the unit")
