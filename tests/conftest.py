"""Object stores for every test: a real SeaweedFS shared by the whole run, a scriptable fake, and memory."""

import fcntl
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.clock import RandomIds
from kvstore.objects import MemoryStore, S3Settings, S3Store
from kvstore.objects.credentials import Credentials
from kvstore.objects.seaweed import SeaweedFS

sys.path.insert(0, str(Path(__file__).parent))

from fakes.fake_s3 import FakeS3

BUCKET = "kvtier-tests"


@dataclass(frozen=True)
class Seaweed:
    """A running SeaweedFS: where it is, and how to use it."""

    endpoint: str
    credentials: Credentials

    def settings(self, **changes) -> S3Settings:
        """Of the bucket that tests share, each under a root of its own. Racing writers stall for seconds: hence the patience."""
        return S3Settings(**{"bucket": BUCKET, "endpoint": self.endpoint, "timeout_s": 60.0, **changes})

    def url(self, root: str) -> str:
        """A storage URL for `kvstore.open` and `kvtier`; credentials come from `environment`."""
        return f"s3://{BUCKET}/{root}?endpoint={self.endpoint}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment."""
        return {"AWS_ACCESS_KEY_ID": self.credentials.access_key, "AWS_SECRET_ACCESS_KEY": self.credentials.secret_key}


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory, worker_id) -> Iterator[Seaweed]:
    """One server for all workers of a run: the first to ask starts it, and ends it when nobody uses it any more."""
    shared = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        shared = shared.parent
    shared = shared / "seaweed"
    shared.mkdir(exist_ok=True)
    state, mine = shared / "running.json", shared / f"user-{worker_id}"
    server = None
    with _locked(shared / "tests.lock"):
        if not state.exists():
            server = SeaweedFS.launch(shared / "data", BUCKET)
            server.wait_ready()
            keys = server.credentials
            state.write_text(json.dumps([server.endpoint, keys.access_key, keys.secret_key]))
        mine.touch()
        endpoint, access, secret = json.loads(state.read_text())
    yield Seaweed(endpoint, Credentials(access, secret))
    with _locked(shared / "tests.lock"):
        mine.unlink()
    patience = time.monotonic() + 120  # a worker that was killed never signs off
    while server:
        with _locked(shared / "tests.lock"):
            if not list(shared.glob("user-*")) or time.monotonic() > patience:
                state.unlink()
                server.kill()
                shutil.rmtree(shared / "data")
                server = None
        time.sleep(0.05)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def s3_store(seaweed) -> Callable[..., AbstractAsyncContextManager]:
    """`async with s3_store(**settings) as store`: the shared bucket on SeaweedFS."""

    @asynccontextmanager
    async def open_store(**changes) -> AsyncIterator[S3Store]:
        async with S3Store.open(seaweed.settings(**changes), credentials=lambda: seaweed.credentials) as store:
            yield store

    return open_store


@pytest.fixture
def root() -> str:
    """A prefix nobody used before."""
    return f"t-{RandomIds().new()[:12]}"


@pytest.fixture
def memory_store() -> MemoryStore:
    """A store of this test's own."""
    return MemoryStore()


@pytest.fixture
def fake_s3() -> Iterator[FakeS3]:
    """A scriptable S3; see `fakes.fake_s3.FakeS3`."""
    fake = FakeS3()
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
def fake_store(fake_s3) -> Callable[..., AbstractAsyncContextManager]:
    """`async with fake_store(**settings) as store`: an S3Store on `fake_s3`."""

    @asynccontextmanager
    async def open_store(credentials=lambda: Credentials("key", "secret"), **changes) -> AsyncIterator[S3Store]:
        settings = S3Settings(**{"bucket": "bucket", "endpoint": fake_s3.endpoint, "timeout_s": 5.0, **changes})
        async with S3Store.open(settings, credentials=credentials) as store:
            yield store

    return open_store
