"""What `doctor` sees of a machine."""

import os

import pytest

from kvstore.cli import machine
from kvstore.cli.machine import examine, memory_limit
from kvstore.cli.running import refuse_more_memory_than_there_is
from kvstore.config import load
from kvstore.errors import Invalid

GIB = 1 << 30


def settings(**flags):
    return load(flags={name.replace("__", "."): value for name, value in flags.items()}).settings


def findings(**flags):
    return {finding.name: finding for finding in examine(settings(**flags))}


@pytest.fixture
def root(tmp_path):
    """A machine with 8 GiB available and no control group."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:    {8 * GIB // 1024} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/kernel/mm/transparent_hugepage").mkdir(parents=True)
    return tmp_path


def group(root, folder, limit_file, limit, usage_file, usage):
    place = root / "sys/fs/cgroup" / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / limit_file).write_text(f"{limit}\n")
    (place / usage_file).write_text(f"{usage}\n")


def test_memory_without_a_control_group_is_the_machines(root):
    assert memory_limit(root) == (8 * GIB, "the machine")


def test_the_tightest_control_group_above_the_process_counts(root):
    (root / "proc/self/cgroup").write_text("0::/pod/node\n")
    group(root, "pod/node", "memory.max", "max", "memory.current", GIB)
    group(root, "pod", "memory.max", 4 * GIB, "memory.current", GIB)
    least, by = memory_limit(root)
    assert least == 3 * GIB
    assert by.endswith("cgroup/pod")


def test_control_groups_of_the_first_version(root):
    (root / "proc/self/cgroup").write_text("4:cpu:/\n3:memory:/box\n0::/\n")
    group(root, "memory/box", "memory.limit_in_bytes", 2 * GIB, "memory.usage_in_bytes", GIB // 2)
    assert memory_limit(root)[0] == GIB + GIB // 2


@pytest.mark.parametrize(("limit", "status"), [(8 * GIB, "ok"), (2 * GIB, "warn"), (GIB, "fail")])
def test_an_arena_must_fit_the_control_group(root, limit, status):
    (root / "proc/self/cgroup").write_text("0::/pod\n")
    group(root, "pod", "memory.max", limit, "memory.current", 0)
    found = next(f for f in examine(settings(dram__size="1536MiB"), root=root) if f.name == "memory")
    assert found.status == status
    assert ("lower dram.size" in found.remedy) == (status != "ok")


@pytest.mark.parametrize(("text", "status"), [("always [within_size] advise never", "ok"), ("always advise [never] deny", "warn")])
def test_huge_pages(root, text, status):
    (root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").write_text(text)
    found = next(f for f in examine(settings(), root=root) if f.name == "huge pages")
    assert found.status == status


def test_a_disk_that_is_too_small_fails_and_a_missing_folder_is_not_made(tmp_path):
    path = tmp_path / "not" / "yet"
    assert findings(nvme__path=str(path), nvme__size="1MiB")["disk"].status == "ok"
    too_big = findings(nvme__path=str(path), nvme__size="900TiB")["disk"]
    assert too_big.status == "fail"
    assert "lower nvme.size" in too_big.remedy
    assert not path.parent.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_direct_io_is_a_warning(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(machine.os, "open", refuse)
    found = findings(nvme__path=str(tmp_path), nvme__size="1MiB")["direct I/O"]
    assert found.status == "warn"
    assert "several times the CPU" in found.detail


def test_no_disk_tier_is_a_warning():
    assert findings()["disk"].status == "warn"


def test_a_socket_path_the_kernel_would_cut_fails(tmp_path):
    assert findings(node__socket=str(tmp_path / "node.sock"))["socket"].status == "ok"
    assert findings(node__socket=str(tmp_path / ("x" * 120)))["socket"].status == "fail"
    assert findings(node__socket=str(tmp_path / "missing" / "node.sock"))["socket"].status == "fail"


def test_an_arena_larger_than_what_is_left_is_refused_before_it_is_touched():
    with pytest.raises(Invalid, match=r"dram\.size is .* lower dram\.size"):
        refuse_more_memory_than_there_is(settings(dram__size="900TiB"))
    refuse_more_memory_than_there_is(settings(dram__size="1MiB"))


def test_the_memory_that_is_named_is_what_is_free(root):
    found = next(f for f in examine(settings(), root=root) if f.name == "memory")
    assert found.detail.endswith(" GiB free")
