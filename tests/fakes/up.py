"""A whole node as a person starts it."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

COMMAND = [sys.executable, "-c", "from kvstore.cli.main import main; main()"]
SMALL = ["--set", "dram.size=32MiB", "--set", "nvme.size=32MiB", "--set", "node.listen=127.0.0.1:0"]


@pytest.fixture(scope="session")
def up():
    """`with up(folder) as (process, ready)`: a running `kvtier up`, and what it said when it was ready. Killed at the end."""

    @contextmanager
    def start(folder, *more):
        process = subprocess.Popen(
            [*COMMAND, "up", "--data", str(folder), *SMALL, "--format", "json", *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith(("KVTIER_", "AWS_"))},
        )
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            yield process, json.loads(line)
        finally:
            process.kill()
            process.communicate()

    return start
