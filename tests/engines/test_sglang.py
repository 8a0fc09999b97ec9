"""SGLang's storage backend under SGLang's own parts: see sglang_real, which runs in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


INJECTOR = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3", "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.01"}


@pytest.mark.parametrize(("picked", "injector"), [("not injector", {}), ("injector", INJECTOR)])
def test_under_its_own_factory_and_host_pools(picked, injector):
    if not (Path(sys.prefix) / "unpacked" / "sglang").is_dir():
        pytest.skip("SGLang is not unpacked here")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", picked, str(HERE / "sglang_real")],
        env=os.environ | injector,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
