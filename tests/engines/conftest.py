"""Fixtures for tests with real engines; README.md tells how to write one. Run by scripts/test-engines, never by scripts/test."""

import os
import pydoc_data.topics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(sys.prefix) / "unpacked"))  # engines' wheels without their requirements: scripts/test-engines

from harness import STARTED, Engine, Node, Store

AT_MOST = 6  # engine processes in a run without --all: each takes half a minute
TEST_S = 420
UNPACKED = {"PYTHONPATH": sys.path[-1], "LMCACHE_TRACK_USAGE": "false"}  # for processes that use them
_TTFT = []
collect_ignore = ["sglang_real"]  # in a process of its own: test_sglang.py


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also the tests marked more_engines")


def pytest_configure(config):
    config.addinivalue_line("markers", "more_engines: starts engine processes beyond those of a normal run; runs with --all")


def pytest_collection_modifyitems(config, items):
    for item in items:
        item.add_marker(pytest.mark.timeout(TEST_S), append=False)
    if not config.getoption("--all"):
        more = [item for item in items if item.get_closest_marker("more_engines")]
        config.hook.pytest_deselected(items=more)  # counted in pytest's closing line
        items[:] = [item for item in items if item not in more]


def pytest_sessionfinish(session):
    if len(STARTED) > AT_MOST and not session.config.getoption("--all"):
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter, config):
    write = terminalreporter.write_line
    if _TTFT:
        write("\ntime to first token")
        for row, tokens, cached, seconds in _TTFT:
            write(f"  {row:<34} {tokens:>6,} tokens {cached:>6,} cached {seconds:>8.3f} s")
    write(f"\nengine processes: {len(STARTED)}" + ("" if config.getoption("--all") else f" (at most {AT_MOST} without --all)"))
    for each in STARTED:
        write(f"  {each.name:<34} {each.seconds:6.1f} s")


@pytest.fixture(scope="session")
def model():
    """Folder of SmolLM2-135M-Instruct; made on the first run (see kvstore.demo.model)."""
    made = subprocess.run(
        [sys.executable, "-c", "from kvstore.demo.model import smollm2; print(smollm2())"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"TRANSFORMERS_VERBOSITY": "error"},
    )
    return Path(made.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def prompt(model):
    """`prompt(tokens, at=0)`: token ids of English prose; other values of `at` give other texts, which share no prefix."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text[:400_000]).ids

    def cut(tokens, at=0):
        assert at + tokens <= len(ids)
        return ids[at : at + tokens]

    return cut


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """A :class:`harness.Store` for the whole run; whoever stops it starts it again."""
    store = Store(tmp_path_factory.mktemp("store"))
    yield store
    store.stop()


@pytest.fixture
def node(tmp_path, store, root):
    """A running :class:`harness.Node` on a root of its own, with an empty disk tier."""
    (tmp_path / "node").mkdir()
    with Node(tmp_path / "node", {"KVTIER_STORE_URL": store.url(root), **store.environment}) as node:
        node.start()
        yield node


@pytest.fixture
def engine(tmp_path, model):
    """`engine(name, connector=..., **llm)`: a :class:`harness.Engine` that runs until the test ends, or is closed or killed."""
    with ExitStack() as running:

        def start(name, *, connector=None, environment=None, **llm):
            return running.enter_context(Engine(name, tmp_path, model, connector=connector, environment=environment, **llm))

        yield start


@pytest.fixture
def run_engine(engine):
    """`run_engine(name, prompts, connector=..., **sampling)`: one process from start to orderly end; (answers, log)."""

    def run(name, prompts, *, connector=None, environment=None, llm=None, **sampling):
        running = engine(name, connector=connector, environment=environment, **(llm or {}))
        answers = [running.generate(each, **sampling)[0] for each in prompts]
        running.close()
        return answers, running.log

    return run


@pytest.fixture(scope="session")
def ttft():
    """`ttft(row, tokens, answer)`: a row of the closing table of times to first token."""
    return lambda row, tokens, answer: _TTFT.append((row, tokens, answer.cached, answer.first_token_s))
