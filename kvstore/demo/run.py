"""The demo: a session outlives its process, its node and its disk, and goes on with the same words.

The store is a SeaweedFS server in a temporary folder; the node and the model are processes of their own, so that they can be
killed. Nothing is left behind at the end.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
from rich.console import Console

from kvstore.demo.processes import Model, Node
from kvstore.demo.table import Found, Row, lines, plural, table
from kvstore.errors import KINDS, KVTierError, Unavailable
from kvstore.objects.seaweed import SeaweedFS

SAMPLES: Final = 5
ANSWER: Final = 16  # tokens
SESSION, FORK = "a-long-talk", "a-long-talk-otherwise"
QUESTIONS: Final = (
    "In one sentence: what is a KV cache?",
    "Why must a cache never be wrong?",
    "What does it cost to fork a conversation?",
)
NEEDED_BYTES: Final = 2 << 30
WIDE: Final = 120  # columns where the output is no terminal: a file should get whole cells


class Expected(msgspec.Struct, frozen=True):
    """A turn as the first process computed it, on its own cache, without a store."""

    new: list[int]  # tokens that are not in the cache yet
    spoken: dict[str, Any]


class Before(msgspec.Struct, frozen=True):
    """All that is known of the first process when it is gone; the session itself is in the bucket."""

    threads: dict[str, int]
    held: list[int]  # the tokens of the session
    kv: str  # digest of their KV
    second: Expected
    forked: Expected


class Demo:
    """The story, told while it happens."""

    def __init__(self, console: Console, folder: Path, node: Node) -> None:
        self._console, self._folder, self._node = console, folder, node

    def run(self) -> Found:
        """All of it."""
        self._node.start()
        with Model("first-model", self._folder) as model:
            before = self._first(model)
            model.process.kill()
        self._node.kill()
        self._node.lose_disk()
        self._say("killed the model's process and the node (kill -9), deleted its memory and disk: only the bucket is left")
        with Model("second-model", self._folder) as model:
            return self._second(model, before)

    def _first(self, model: Model) -> Before:
        with self._busy("loading SmolLM2-135M (the first time it is converted, half a minute)"):
            model.ask("load")
        with self._busy("one thread, or all?"):
            pace = model.ask("pace")
        threads = pace["threads"]
        self._say(f"{plural(threads['reading'], 'thread')} to read, {threads['stepping']} to go on: what is fastest here")
        document = files("kvstore.demo").joinpath("document.md").read_text(encoding="utf-8")
        prompt = model.ask("prompt", document=document, question=QUESTIONS[0])["tokens"]
        with self._busy(f"turn 1: reading {len(prompt):,} tokens"):
            spoken = model.ask("compute", tokens=prompt, answer=ANSWER)["spoken"]
        self._say(f"turn 1: read {len(prompt):,} tokens in {spoken['seconds']:.2f} s")
        self._quote(model, QUESTIONS[0], spoken)
        model.ask("attach", url=self._node.url)
        with self._busy("committing the session to the bucket"):
            done = model.ask("commit", session=SESSION)
        receipt = done["receipt"]
        self._say(
            f"committed version {receipt['version']}: {receipt['tokens']:,} tokens, in the bucket after {done['seconds']:.2f} s"
        )
        history, held = prompt + spoken["tokens"], receipt["tokens"]
        with self._busy("the next turns, without a store, to compare with"):
            second, forked = (self._expected(model, history, held, question) for question in QUESTIONS[1:])
        return Before(threads, history[:held], done["kv"], second, forked)

    @staticmethod
    def _expected(model: Model, history: list[int], held: int, question: str) -> Expected:
        new = history[held:] + model.ask("follow", history=history, question=question)["tokens"]
        return Expected(new, model.ask("proceed", tokens=new, answer=ANSWER)["spoken"])

    def _second(self, model: Model, before: Before) -> Found:
        with self._busy("a new process: loading the model"):
            model.ask("load", **before.threads)
        rows = [
            self._restored(model, before, "bucket", self._lose_everything),
            self._restored(model, before, "nvme", self._restart),
            self._restored(model, before, "dram", lambda: None),
        ]
        version = model.ask("commit", session=SESSION)["receipt"]["version"]
        self._say(f"turn 2 committed: version {version}")
        rows.append(self._forked(model, before))
        return Found(rows=[self._recomputed(model, before), *rows], tokens=len(before.held), threads=before.threads)

    def _lose_everything(self) -> None:
        self._node.kill()
        self._node.lose_disk()
        self._node.start()

    def _restart(self) -> None:
        self._node.stop()
        self._node.start()

    def _restored(self, model: Model, before: Before, source: str, prepare: Callable[[], None]) -> Row:
        """Resume the session again and again, with its blocks nowhere nearer than in `source`."""
        samples = []
        for sample in range(SAMPLES):
            with self._busy(f"turn 2 from {source}: {sample + 1} of {SAMPLES}"):
                prepare()
                model.ask("attach", url=self._node.url)
                answer = ANSWER if sample == SAMPLES - 1 else 1
                samples.append(model.ask("resume", session=SESSION, tokens=before.second.new, answer=answer))
        last = samples[-1]
        seconds = [sample["spoken"]["seconds"] for sample in samples]
        self._say(
            f"turn 2 from {source}: {last['tokens']:,} tokens restored in {last['restore_s']:.3f} s,"
            f" first token after {min(seconds):.3f} to {max(seconds):.3f} s"
        )
        if source == "bucket":
            self._quote(model, QUESTIONS[1], last["spoken"])
        identical = all(_same(sample, before.second, before.kv) for sample in samples)
        return Row(source=source, seconds=seconds, by_tier=last["by_tier"], identical=identical)

    def _forked(self, model: Model, before: Before) -> Row:
        """Another second turn, after the same first one."""
        made = model.ask("fork", session=SESSION, new=FORK, version=1)
        self._say(f"forked version 1: {made['session']['tokens']:,} tokens for another session in {made['seconds'] * 1e3:.0f} ms")
        resumed = model.ask("resume", session=FORK, tokens=before.forked.new, answer=ANSWER)
        self._quote(model, QUESTIONS[2], resumed["spoken"])
        model.ask("commit", session=FORK)
        identical = _same(resumed, before.forked, before.kv)
        return Row(source="fork", seconds=[resumed["spoken"]["seconds"]], by_tier=resumed["by_tier"], identical=identical)

    def _recomputed(self, model: Model, before: Before) -> Row:
        """The same turn without a store: the whole conversation is read again."""
        tokens = before.held + before.second.new
        seconds, identical = [], True
        for sample in range(SAMPLES):
            with self._busy(f"turn 2 without a store, for comparison: {sample + 1} of {SAMPLES}"):
                spoken = model.ask("compute", tokens=tokens, answer=ANSWER if sample == 0 else 1)["spoken"]
            seconds.append(spoken["seconds"])
            # Reading in one piece and in two rounds differently, so logits differ in their last bits; the words must not.
            identical &= _said(spoken, before.second)
        return Row(source="recompute", seconds=seconds, identical=identical)

    def _quote(self, model: Model, question: str, spoken: dict[str, Any]) -> None:
        text = model.ask("text", tokens=spoken["tokens"])["text"]
        self._console.print(f"    [dim]{question}[/dim]\n    [italic]{text}[/italic]", highlight=False)

    def _say(self, text: str) -> None:
        self._console.print(f"[green]✓[/green] {text}", highlight=False)

    def _busy(self, text: str) -> AbstractContextManager[object]:
        return _busy(self._console, text)


def _busy(console: Console, text: str) -> AbstractContextManager[object]:
    """A spinner; in a file or pipe a line, as nobody should take a minute's work for a hang."""
    if console.is_terminal:
        return console.status(text)
    console.print(f"  {text}", highlight=False, markup=False)
    return nullcontext()


def _same(resumed: dict[str, Any], expected: Expected, kv: str) -> bool:
    """Whether the restored cache, the logits that follow and the answer are those of the process that is gone, bit for bit."""
    spoken = resumed["spoken"]
    return bool(resumed["kv"] == kv and spoken["first"] == expected.spoken["first"] and _said(spoken, expected))


def _said(spoken: dict[str, Any], expected: Expected) -> bool:
    """Whether the answer, as far as it was asked for, is the expected one."""
    return bool(spoken["tokens"] == expected.spoken["tokens"][: len(spoken["tokens"])])


@contextmanager
def stage(console: Console) -> Iterator[Demo]:
    """A store, a node and a folder, all gone at the end of the block."""
    with ExitStack() as lifetime:
        folder = Path(lifetime.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-demo-")))
        free = shutil.disk_usage(folder).free
        if free < NEEDED_BYTES:
            raise Unavailable(
                f"{folder.parent} has {free >> 20} MiB free, and the demo needs {NEEDED_BYTES >> 20}",
                remedy="make room, or name a folder on a larger disk: TMPDIR=/path ./scripts/demo",
            )
        store = SeaweedFS.launch(folder / "store")
        lifetime.callback(store.stop)
        with _busy(console, "starting an S3 server (SeaweedFS)"):
            store.wait_ready()
        environment = {
            "KVTIER_STORE_URL": f"s3://{store.bucket}/demo?endpoint={store.endpoint}",
            "AWS_ACCESS_KEY_ID": store.credentials.access_key,
            "AWS_SECRET_ACCESS_KEY": store.credentials.secret_key,
        }
        yield Demo(console, folder, lifetime.enter_context(Node(folder, environment)))


def main() -> NoReturn:
    """What `./scripts/demo` runs. Exit status: 0 identical output everywhere, 1 not, else as the command's."""
    parser = argparse.ArgumentParser(prog="demo", description="A session outlives its process, its node and its disk.")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda caught, _: sys.exit(128 + caught))
    console = Console(stderr=True, soft_wrap=not sys.stderr.isatty())
    try:
        with stage(console) as demo:
            found = demo.run()
    except KeyboardInterrupt:
        console.print("stopped; nothing was left behind")
        sys.exit(130)
    except KVTierError as error:
        console.print(f"error: {error.message}\n  {error.remedy}", style="red", highlight=False, markup=False)
        sys.exit(KINDS[error.kind].exit)
    if options.json:
        for line in lines(found):
            sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    else:
        Console(width=None if sys.stdout.isatty() else WIDE).print(table(found))
    sys.exit(0 if found.identical else 1)


if __name__ == "__main__":
    main()
