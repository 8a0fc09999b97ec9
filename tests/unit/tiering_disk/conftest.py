"""Folders for a disk tier."""

import subprocess

import pytest


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tier"


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 12 MiB."""
    at = tmp_path / "mounted"
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "kvtier-test", at], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root: {mounted.stderr.decode().strip()}")
    yield at
    subprocess.run(["umount", "-l", at], check=True)
