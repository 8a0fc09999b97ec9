"""The real code against a dictionary, under faults, deaths, stalls and collections, in orders that nobody thought of.

After every step the invariants are read off the bare store: I1 whatever any head names exists; I2 a version, once acknowledged,
holds what was acknowledged and stays restorable while history keeps it; I3 it is found by its name; I4 nothing of a session that
was deleted comes back or gets into the next one of that name.
"""

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from kvstore import codec
from kvstore.clock import SeededIds, VirtualClock
from kvstore.errors import AlreadyExists, Conflict, Gone, KVTierError, NotFound, Unavailable
from kvstore.ids import BlockName, Shard
from kvstore.lifecycle.collector import collect
from kvstore.model import Head, Name, parse
from kvstore.objects import Crash, Fault, Faults, MemoryStore
from kvstore.repo import want
from kvstore.repo.fsck import fsck
from kvstore.repo.heads import versions_of
from kvstore.repo.manifests import unpack
from kvstore.repo.testing import Shelf, bodies, broken, commit, opened, tiny, until

NS = tiny()
NAMES = ("x", "y")
HISTORY = 3
Tokens = tuple[int, ...]

OUT_OF_REACH = [Fault(action="lost", verb="put", key="*/heads/*"), Fault(action="before", verb="get", key="*/heads/*")]
faults = st.sampled_from([[], [], [], OUT_OF_REACH]) | st.lists(
    st.one_of(
        st.builds(Fault, action=st.just("lost"), verb=st.just("put"), key=st.just("*/heads/*"), skip=st.integers(0, 1)),
        st.builds(
            Fault, action=st.sampled_from(["before", "busy"]), verb=st.just("get"), key=st.sampled_from(["*/heads/*", "*/epoch"])
        ),
        st.builds(
            Fault,
            action=st.sampled_from(["before", "lost", "crash-before", "crash-after"]),
            verb=st.sampled_from(["put", "*"]),
            key=st.sampled_from(["*/heads/*", "*/names/*", "*"]),
            skip=st.integers(0, 6),
            times=st.integers(1, 2),
        ),
    ),
    max_size=2,
)


class Story:
    """What must be true of a session.

    `acked` are versions of the one that lives; `open` are contents that operations under way, or of unknown outcome, may make.
    """

    def __init__(self) -> None:
        self.lives = False
        self.acked: dict[int, Tokens] = {}
        self.open: list[Tokens] = []
        self.may_end = False
        self.last: tuple[int, Tokens] = (0, ())  # what it held when it was last seen, dead or alive


class Node:
    """A process: it can be stopped at any request, and never comes back."""

    def __init__(self, memory, clock, seed: int) -> None:
        self.store = Faults(memory, clock=clock)
        self._stack = AsyncExitStack()
        self._opening = opened(self.store, clock, SeededIds(seed), session_ttl=0, history=HISTORY)

    async def start(self) -> "Node":
        self.repo = await self._stack.enter_async_context(self._opening)
        return self

    async def stop(self) -> None:
        await self._stack.aclose()


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock, self.shelf = VirtualClock(), Shelf()
        self.memory = MemoryStore(self.clock)
        self.stories = {name: Story() for name in NAMES}
        self.seed = self.fresh = 0
        self.stalled: list[tuple[Node, asyncio.Task, str, int, Tokens]] = []
        self.nodes: list[Node] = []

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 60))

    @initialize()
    def begin(self) -> None:
        self.nodes = [self.node(), self.node()]
        self.keys = self.nodes[0].repo.root.keys

    def node(self) -> Node:
        self.seed += 1
        return self.run(Node(self.memory, self.clock, self.seed).start())

    def teardown(self) -> None:
        if self.nodes:
            while self.stalled:
                self.release(0)
                self.truth()
            for node in self.nodes:
                self.run(node.stop())
            last = self.node()
            self.run(collect(last.repo, now=True))
            self.run(collect(last.repo, now=True))
            self.truth()
            report = self.run(fsck(last.repo, deep=True))
            assert report.clean, report.findings
            assert report.garbage_blocks == report.garbage_manifests == 0  # I12
            self.run(last.stop())
        self.loop.close()

    # --- operations ---

    def act(self, which: int, work, faults: list[Fault], name: str, opens: list[Tokens] = (), ends: bool = False):
        """One operation on one node. Returns its answer, an error that says it was not done, or None where nobody knows."""
        node = self.nodes[which]
        node.store.script = [msgspec.structs.replace(fault) for fault in faults]
        story = self.stories[name]
        try:
            return self.run(work(node.repo))
        except Crash:
            self.run(node.stop())
            self.nodes[which] = self.node()
        except Unavailable as error:
            if error.kind != "outcome_unknown":
                return error
        except (Conflict, Gone, NotFound, AlreadyExists) as error:
            return error
        finally:
            node.store.script = []
        story.open += opens
        story.may_end |= ends
        return None

    def read(self, name: str) -> tuple[int, Tokens, dict[int, Tokens]] | None:
        """Current version, tokens and history of a session, straight from the objects."""
        objects = bodies(self.memory)
        key = self.keys.name("default", name, NS.id, "main")
        if key not in objects:
            return None
        meant = parse(objects[key], Name, key)
        head_key = self.keys.head("default", meant.family)
        branch = parse(objects[head_key], Head, head_key).branches.get(meant.branch)
        if branch is None:
            return None
        found = {}
        for version in versions_of(branch):
            manifest_key = self.keys.manifest("default", meant.family, version.manifest)
            manifest = unpack(objects[manifest_key], manifest_key)
            found[version.seq] = self.tokens_of(manifest.blocks[: version.n])
        return branch.seq, found.pop(branch.seq), found

    def tokens_of(self, blocks) -> Tokens:
        return tuple(token for block in blocks for token in self.spelled[block.prefix_id, block.tokens])

    @property
    def spelled(self) -> dict:
        known = self.__dict__.setdefault("_spelled", {})
        for block in self.shelf.held:
            if (block.prefix_id, block.tokens) not in known:
                raw = memoryview(self.shelf.held[block])
                known[block.prefix_id, block.tokens] = codec.tensors(raw, block, NS)["token_ids"].tolist()
        return known

    def next_tokens(self, before: Tokens, kind: str, count: int) -> Tokens:
        """A continuation, an edit, a cut or a repetition of what a session holds; or what all say, for blocks to be shared."""
        if kind == "common":
            return tuple(range(1_000_000, 1_000_000 + 2 * count))
        if kind in {"repeat", "cut"} and len(before) > 1:
            return before if kind == "repeat" else before[: max(1, len(before) - count)]
        fresh = tuple(range(self.fresh, self.fresh + count))
        self.fresh += count
        return before[: len(before) // 2 if kind == "edit" else len(before)] + fresh

    @rule(
        which=st.integers(0, 1),
        name=st.sampled_from(NAMES),
        kind=st.sampled_from(["append", "append", "edit", "cut", "repeat", "common"]),
        count=st.integers(1, 9),
        behind=st.sampled_from([0, 1, 2]),
        faults=faults,
        write_id=st.booleans(),
    )
    def commit(self, which, name, kind, count, behind, faults, write_id) -> None:
        now = self.read(name)
        version, before = (0, ()) if now is None else now[:2]
        base = max(0, version - behind)
        self.propose(which, name, base, self.next_tokens(before, kind, count), faults, write_id=write_id)

    @rule(which=st.integers(0, 1), name=st.sampled_from(NAMES), count=st.integers(1, 9))
    def commit_common(self, which, name, count) -> None:
        now = self.read(name)
        self.propose(which, name, 0 if now is None else now[0], self.next_tokens((), "common", count), [])

    @rule(which=st.integers(0, 1), name=st.sampled_from(NAMES), extra=st.integers(0, 5), faults=faults)
    def commit_out_of_date(self, which, name, extra, faults) -> None:
        """By somebody who knows the session only as it once was."""
        version, tokens = self.stories[name].last
        if version:
            self.propose(which, name, version, self.next_tokens(tokens, "append", extra) if extra else tokens, faults)

    def propose(self, which: int, name: str, base: int, mine: Tokens, faults: list[Fault], *, write_id: bool = False) -> None:
        before = self.read(name)
        self.seed += 1
        fields = {"write_id": f"{self.seed:032x}"} if write_id else {}

        def work(repo):
            return commit(repo, self.shelf, name, mine, base, NS, lane="main", **fields)

        answer = self.act(which, work, faults, name, [mine])
        if answer is None and write_id:  # nobody knows: the same again, under the same write id, by whoever lives
            answer = self.act(which, work, [], name, [mine])
        elif not faults:
            self.foretold(before, base, mine, answer)
        self.acknowledged(name, answer, base, mine)

    def foretold(self, before, base: int, mine: Tokens, answer) -> None:
        """Step 6, on tokens."""
        if before is None:
            assert isinstance(answer, Gone | NotFound) == (base > 0), answer
            return
        if isinstance(answer, Conflict) and "made again" in answer.message:
            assert base > 0  # this node knew an earlier session of that name
            return
        version, tokens, history = before
        contents = {**history, version: tokens, 0: ()}
        chain = [contents.get(each) for each in range(base, version + 1)]
        grew = None not in chain and all(later[: len(earlier)] == earlier for earlier, later in pairwise(chain))
        contained = tokens[: len(mine)] == mine
        towards = grew and mine[: len(tokens)] == tokens
        fine = base == version or (base < version and (contained or towards))
        if not fine and base < version:
            assert isinstance(answer, Conflict), (before, base, mine, answer)
        elif fine:
            assert not isinstance(answer, Conflict), (before, base, mine, answer)

    def acknowledged(self, name: str, answer, base: int, mine: Tokens) -> None:
        """A receipt says which version holds exactly what was committed; the caller's own base where only longer ones do."""
        if answer is None or isinstance(answer, KVTierError):
            return
        assert not answer.cut
        story, actual = self.stories[name], self.read(name)
        assert actual is not None
        contents = {actual[0]: actual[1], **actual[2]}
        story.lives = True
        if contents.get(answer.version) != mine:
            assert answer.version == base
            assert any(content[: len(mine)] == mine for version, content in contents.items() if version > base)
            return
        assert story.acked.get(answer.version, mine) == mine
        story.acked[answer.version] = mine
        story.open.append(mine)

    @rule(which=st.integers(0, 1), name=st.sampled_from(NAMES), faults=faults)
    def create(self, which, name, faults) -> None:
        lived = self.read(name) is not None
        answer = self.act(which, lambda repo: repo.sessions.create("default", name, NS), faults, name, [()])
        assert not (lived and answer is not None and not isinstance(answer, AlreadyExists | Unavailable))
        if answer is not None and not isinstance(answer, KVTierError):
            self.stories[name].lives, self.stories[name].acked = True, {0: ()}

    @rule(which=st.integers(0, 1), name=st.sampled_from(NAMES), to=st.sampled_from(NAMES), faults=faults)
    def fork(self, which, name, to, faults) -> None:
        now, taken = self.read(name), self.read(to) is not None
        tokens = () if now is None else now[1]
        answer = self.act(
            which, lambda repo: repo.sessions.fork("default", name, NS.id, "main", to), faults, to, [] if now is None else [tokens]
        )
        if answer is not None and not isinstance(answer, KVTierError):
            assert not taken
            self.stories[to].lives, self.stories[to].acked = True, {answer.version: tokens}

    @rule(which=st.integers(0, 1), name=st.sampled_from(NAMES), to=st.integers(0, 40), faults=faults)
    def rewind(self, which, name, to, faults) -> None:
        now = self.read(name)
        cut = [] if now is None else [now[1][:length] for length in range(len(now[1]) + 1)]
        answer = self.act(which, lambda repo: repo.sessions.rewind("default", name, NS.id, "main", tokens=to), faults, name, cut)
        if answer is not None and not isinstance(answer, KVTierError):
            assert answer.tokens == (to // 4 * 4 if to < len(now[1]) else len(now[1]))
            self.stories[name].acked[answer.version] = now[1][: answer.tokens]

    @rule(which=st.integers(0, 1), name=st.sampled_from(NAMES), back=st.integers(1, HISTORY), faults=faults)
    def restore_version(self, which, name, back, faults) -> None:
        now = self.read(name)
        version = 10_000 if now is None else max(1, now[0] - back)
        opens = [] if now is None or version not in now[2] else [now[2][version]]
        answer = self.act(
            which, lambda repo: repo.sessions.rewind("default", name, NS.id, "main", version=version), faults, name, opens
        )
        if answer is not None and not isinstance(answer, KVTierError) and opens:
            self.stories[name].acked[answer.version] = opens[0]

    @rule(which=st.integers(0, 1), name=st.sampled_from(NAMES), faults=faults)
    def delete(self, which, name, faults) -> None:
        answer = self.act(which, lambda repo: repo.sessions.delete("default", name, NS.id, "main"), faults, name, ends=True)
        if answer is None or not isinstance(answer, KVTierError):
            self.stories[name].may_end = True

    @rule(which=st.integers(0, 1), now=st.sampled_from([True, True, False]), faults=faults)
    def collect(self, which, now, faults) -> None:
        self.act(which, lambda repo: collect(repo, now=now), faults, NAMES[0])

    @rule(
        which=st.integers(0, 1),
        name=st.sampled_from(NAMES),
        what=st.sampled_from(["touch", "epoch", "restart", "offer"]),
        faults=faults,
    )
    def small_things(self, which, name, what, faults) -> None:
        if what == "touch":
            self.act(which, lambda repo: repo.sessions.touch("default", name, NS.id, "main", ttl=0), faults, name)
        elif what == "epoch":
            self.epoch_passes()
        elif what == "restart":
            self.restart(which)
        else:
            self.offer(which, name, faults)

    def epoch_passes(self) -> None:
        repo = self.nodes[0].repo
        self.run(repo.epochs.advance(self.run(repo.epochs.read())))

    def restart(self, which: int) -> None:
        self.run(self.nodes[which].stop())
        self.nodes[which] = self.node()

    def offer(self, which: int, name: str, faults: list[Fault]) -> None:
        """Anonymous blocks, of the very tokens that commits use too."""
        tokens = self.next_tokens((), "common", 6)
        for link in self.shelf.fill(NS, tokens):
            block = BlockName(NS.id, Shard(), link.prefix_id, link.tokens)
            with self.shelf.lease(block, self.shelf.held[block]) as lease:
                self.act(which, lambda repo, b=block, v=lease: repo.origin.offer(want(NS, b), v), faults, name)

    @rule(which=st.integers(0, 1), name=st.sampled_from(NAMES))
    def resolve(self, which, name) -> None:
        actual = self.read(name)
        try:
            session, manifest = self.run(self.nodes[which].repo.sessions.resolve("default", name, NS.id, "main"))
        except (NotFound, Gone):
            assert actual is None
            return
        assert (session.version, self.tokens_of(manifest.blocks)) == actual[:2]

    # --- stalls: a node of its own is held at a request while the world goes on ---

    @precondition(lambda self: len(self.stalled) < 2)
    @rule(
        name=st.sampled_from(NAMES),
        kind=st.sampled_from(["append", "common"]),
        count=st.integers(1, 9),
        warm=st.booleans(),
        meanwhile=st.sampled_from(["", "collect", "delete", "make again"]),
        at=st.sampled_from(
            [
                ("put", "*/heads/*", 0),
                ("put", "*/heads/*", 1),
                ("get", "*/heads/*", 0),
                ("get", "*/epoch", 0),
                ("put", "*/manifests/*", 0),
                ("*", "*/blocks/*", 0),
                ("*", "*/blocks/*", 2),
            ]
        ),
    )
    def stall_a_commit(self, name, kind, count, warm, meanwhile, at) -> None:
        if self.read(name) is None or any(held == name for _, _, held, _, _ in self.stalled):
            return
        node = self.node()
        if warm:  # it has a chain of swaps, and the epoch that goes with it
            self.run(node.repo.sessions.touch("default", name, NS.id, "main", ttl=0))
            version, before, _ = self.read(name)
            more = self.next_tokens(before, "append", 4)
            self.acknowledged(name, self.run(commit(node.repo, self.shelf, name, more, version, NS, lane="main")), version, more)
        version, before, _ = self.read(name)
        if not version:
            self.run(node.stop())
            return
        self.run(node.repo.sessions.get("default", name, NS.id, "main"))  # it knows which session it means
        mine = self.next_tokens(before, kind, count)
        node.store.script = [Fault(action="stall", verb=at[0], key=at[1], skip=at[2])]
        self.stories[name].open.append(mine)
        if (
            not self.start(node, commit(node.repo, self.shelf, name, mine, version, NS, lane="main"), name, version, mine)
            or not meanwhile
        ):
            return
        self.truth()
        if meanwhile == "collect":
            self.collect(0, True, [])
        else:
            self.delete(0, name, [])
            self.truth()
            for step in range(version if meanwhile == "make again" else 0):  # up to the very version that it was built on
                self.go_on(1, name, "append")
                self.truth()
                assert self.read(name)[0] == step + 1
        self.truth()
        self.release(len(self.stalled) - 1)

    @precondition(lambda self: len(self.stalled) < 2)
    @rule(
        now=st.booleans(),
        at=st.sampled_from(
            [("put", "*/heads/*"), ("get", "*/manifests/*"), ("list", "r/heads/"), ("list", "r/manifests/"), ("delete", "*")]
        ),
        which=st.integers(0, 1),
        name=st.sampled_from(NAMES),
        before=st.sampled_from(["", "commit", "offer", "offer, then an epoch"]),
        cold=st.booleans(),
        kind=st.sampled_from(["", "append", "common"]),
    )
    def stall_a_collection(self, now, at, which, name, before, cold, kind) -> None:
        if before == "commit":
            self.go_on(which, name, "append")
        elif before:
            self.offer(which, name, [])
            if "epoch" in before:
                self.epoch_passes()
        if cold:
            self.restart(which)
        node = self.node()
        node.store.script = [Fault(action="stall", verb=at[0], key=at[1])]
        if self.start(node, collect(node.repo, now=now), "", 0, ()) and kind:
            self.truth()
            self.go_on(which, name, kind)
            self.truth()
            self.release(len(self.stalled) - 1)

    def go_on(self, which: int, name: str, kind: str) -> None:
        now = self.read(name)
        version, tokens = (0, ()) if now is None else now[:2]
        self.propose(which, name, version, self.next_tokens(tokens, kind, 4), [])

    def start(self, node: Node, work, name: str, base: int, mine: Tokens) -> bool:
        """Begin something on a node that is held at a request. False where it was over before it came to that."""

        async def begin() -> asyncio.Task:
            task = asyncio.get_running_loop().create_task(work)
            await until(lambda: task.done() or not node.store.script[0].times)
            return task

        self.stalled.append((node, self.run(begin()), name, base, mine))
        if not self.stalled[-1][1].done():
            return True
        self.release(len(self.stalled) - 1)
        return False

    @precondition(lambda self: self.stalled)
    @rule(index=st.integers(0, 1))
    def release(self, index) -> None:
        node, task, name, base, mine = self.stalled.pop(index % len(self.stalled))
        node.store.release.set()

        async def end():
            return (await asyncio.gather(task, return_exceptions=True))[0]

        answer = self.run(end())
        assert not isinstance(answer, BaseException) or isinstance(answer, Conflict | Gone | NotFound | Unavailable), answer
        self.run(node.stop())
        if name:
            assert mine in self.stories[name].open or isinstance(answer, KVTierError), f"{name} was deleted under it: {answer}"
            self.acknowledged(name, answer, base, mine)

    # --- what must hold after every step ---

    @invariant()
    def truth(self) -> None:
        if not self.nodes:
            return
        assert broken(bodies(self.memory), self.keys) == []
        for name, story in self.stories.items():
            actual = self.read(name)
            if actual is None:
                assert not story.lives or story.may_end, f"{name} is gone"
                story.lives, story.acked, story.open = False, {}, []  # what was under way for it has lost its object (I4)
            else:
                version, tokens, history = actual
                assert story.lives or story.open, f"{name} is there, and nobody made it"
                assert version >= max(story.acked, default=0), f"{name} went back to {version}"
                assert tokens == story.acked.get(version, tokens)
                assert version in story.acked or tokens in story.open, f"{name} holds what nobody wrote: {tokens}"
                for past, content in story.acked.items():
                    if past in history:
                        assert history[past] == content
                    else:
                        assert past in {0, version} or past < version - HISTORY or min(story.acked) == past
                story.lives, story.acked[version] = True, tokens
                under_way = [mine for _, _, held, _, mine in self.stalled if held == name]
                story.open = [mine for mine in story.open if mine in under_way]
                story.last = (version, tokens)
            story.may_end = False


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_the_real_code_against_a_dictionary(number):
    run_state_machine_as_test(
        seed(number)(type("Machine", (Machine,), {})),
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # add Phase.shrink when it fails: that takes minutes, and the steps become few
        ),
    )
