"""Watches every write as the store carries it out, and knows what must hold at that instant.

It reads what is stored and nothing that the nodes believe. What a branch held, and when, is kept for judging answers later.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.ids import Link
from kvstore.model import Epoch, Head, Name, parse
from kvstore.repo.heads import versions_of
from kvstore.repo.manifests import unpack
from simulation.wire import START


@dataclass
class Content:
    """A version: its tokens, and the operation that wrote it."""

    tokens: tuple
    op: int
    manifest: str
    n: int


class Effect(NamedTuple):
    """An operation made a version."""

    when: float
    branch: str
    seq: int
    life: object


@dataclass
class BranchLife:
    """All that ever happened to a branch."""

    id: str
    head: str
    born: float
    maker: object  # the life of a node
    versions: dict = field(default_factory=dict)  # seq -> Content
    timeline: list = field(default_factory=list)  # (when, seq), the last one is current
    gone: float = float("inf")
    why: str = ""
    last: object = None  # the Branch as it last was
    names: dict = field(default_factory=dict)  # key of a name -> when it began to mean this branch

    def current(self, start, end):
        """Which versions were current at some moment of [start, end]."""
        seqs = set()
        for index, (when, seq) in enumerate(self.timeline):
            until = self.timeline[index + 1][0] if index + 1 < len(self.timeline) else self.gone
            if when <= end and until >= start:
                seqs.add(seq)
        return seqs

    def lived(self, start, end):
        return self.born <= end and self.gone >= start


@dataclass
class Parsed:
    """A manifest, as its head may name it."""

    blocks: list  # the keys of each block's copies, with their sizes
    prefixes: list  # tokens up to and with each block
    op: int
    namespace: str


class Truth:
    def __init__(self, world, library):
        self._world, self._library = world, library
        self.heads = {}  # key -> Head
        self.names = {}  # key -> [(when, Name)]
        self.branches = {}  # id -> BranchLife
        self.effects = {}  # op -> [Effect]
        self.epoch = 0
        self._named = {}  # head key -> {object key: size}
        self._uses = Counter()
        self._manifests = {}
        self._introduced = set()
        self._bodies = {}  # register key -> digests seen
        self._bytes = self._named_bytes = 0  # of blocks that are named, and of all that ever came to be
        self._collections = {}  # life -> bytes named when one of its collections began, less all that ever came to be by then

    @property
    def _keys(self):
        return self._world.keys

    # --- as they take effect ---

    def put(self, life, key, body, now):
        if self._keys.parse_head(key):
            self._head(life, key, parse(body, Head, key), now)
            self._fresh(key, body)
        elif self._keys.parse_name(key):
            self._name(key, parse(body, Name, key), now)  # may repeat: whom it means is judged, and who is gone stays gone
        elif key == self._keys.epoch:
            epoch = parse(body, Epoch, key).epoch
            if epoch <= self.epoch:
                self.wrong("R9", f"epoch {self.epoch} was followed by {epoch}")
            self.epoch = epoch
            self._fresh(key, body)
        elif key in self._uses and len(self._world.clear[key]) != len(body):
            self.wrong("I1", f"{key} is named and was overwritten by another size")

    def gone(self, life, keys):
        for key in keys:
            if self._uses[key] > 0:
                head = next(head for head, named in self._named.items() if key in named)
                self.wrong("I1", f"{life} deleted {key}, which {head} names")
            dead = key in self.heads and self.heads[key].dead  # and stays so: whatever is written to it from now on is wrong
            if not dead and (key in self.heads or key in self.names or key == self._keys.epoch):
                self.wrong("I6", f"{life} deleted {key}")

    def _fresh(self, key, body):
        seen = self._bodies.setdefault(key, set())
        if body in seen:
            self.wrong("R8", f"a body of {key} was written twice")
        seen.add(body)

    # --- heads ---

    def _head(self, life, key, head, now):
        before = self.heads.get(key, Head())
        if key in self.heads and head.swaps != before.swaps + 1:
            self.wrong("R8", f"{key}: swaps went from {before.swaps} to {head.swaps}")
        if before.dead or (head.dead and head.branches):
            self.wrong("I6", f"{key}: a dead head was written to, or one in use was ended")
        known = {version.manifest: 0 for branch in before.branches.values() for version in versions_of(branch)}
        for branch in before.branches.values():
            for version in versions_of(branch):
                known[version.manifest] = max(known[version.manifest], version.n)
        for name, branch in before.branches.items():
            if name not in head.branches:
                self._removed(life, key, name, branch, now)
        for name, branch in head.branches.items():
            self._changed(life, key, name, before.branches.get(name), branch, known, now)
        self.heads[key] = head
        self._index(key, head)

    def _removed(self, life, key, name, branch, now):
        truth = self.branches[name]
        truth.gone, truth.last = now, branch
        expired = not branch.pinned and 0 < branch.expires <= START + now
        if expired:
            truth.why = "expired"
        elif self._world.history.deleting(life, truth, now):
            truth.why = "deleted"
        elif not branch.pinned and self._over_the_limit(life):
            truth.why = "evicted"
        elif not truth.names and life is truth.maker:
            truth.why = "never named"
        else:
            self.wrong(
                "I5",
                f"{life} dropped branch {name[:8]} of {key}, which expires at {branch.expires - START:.1f}, pinned={branch.pinned}",
            )

    def _changed(self, life, key, name, before, branch, known, now):
        truth = self.branches.get(name)
        if truth is None:
            truth = self.branches[name] = BranchLife(name, key, now, life)
        elif before is None:
            self.wrong("R7", f"branch {name[:8]} of {key} came back")
            truth.gone = float("inf")
        elif truth.head != key:
            self.wrong("R7", f"branch {name[:8]} is in two heads")
        truth.last = branch
        if before is not None and branch.seq == before.seq:
            if (branch.manifest, branch.n) != (before.manifest, before.n):
                self.wrong("I2", f"version {branch.seq} of branch {name[:8]} was changed")
            return
        if before is not None and branch.seq != before.seq + 1:
            self.wrong("I2", f"branch {name[:8]} went from version {before.seq} to {branch.seq}")
        if branch.manifest in known and branch.n > known[branch.manifest]:
            self.wrong("R10", f"branch {name[:8]} became longer without a commit")
        content = self._content(key, branch)
        truth.versions[branch.seq] = content
        truth.timeline.append((now, branch.seq))
        if branch.manifest and branch.manifest not in self._introduced:
            self._introduced.add(branch.manifest)
            self.effects.setdefault(content.op, []).append(Effect(now, name, branch.seq, life))
            op = self._world.history.ops.get(content.op)
            past = truth.versions.get(branch.seq - 1)
            if op is None or op.kind != "commit" or past is None or (op.base == branch.seq - 1 and op.built_on == past.tokens):
                return
            if content.tokens[: len(past.tokens)] != past.tokens:
                self.wrong("I2", f"{op} replaced version {branch.seq - 1}, which it had not seen")

    def _content(self, key, branch):
        if not branch.manifest:
            return Content((), -1, "", 0)
        parsed = self._parsed(key, branch.manifest)
        if parsed is None or len(parsed.blocks) < branch.n:
            return Content((), -1, branch.manifest, branch.n)  # `_index` says what is wrong
        return Content(parsed.prefixes[branch.n - 1] if branch.n else (), parsed.op, branch.manifest, branch.n)

    def _parsed(self, head_key, name):
        tenant, family = self._keys.parse_head(head_key)
        key = self._keys.manifest_of(tenant, family, name)
        if key not in self._manifests:
            stored = self._world.clear.get(key)
            if stored is None:
                return None
            manifest = unpack(stored, key)
            blocks = [
                {
                    self._keys.block(manifest.namespace, manifest.shards[copy.shard], block.prefix_id, copy.gen): copy.bytes
                    for copy in block.copies
                }
                for block in manifest.blocks
            ]
            prefixes = [self._library.tokens[Link(block.prefix_id, block.tokens)] for block in manifest.blocks]
            op = int(manifest.labels.get("op", -1))
            self._manifests[key] = Parsed(blocks, prefixes, op, manifest.namespace)
        return self._manifests[key]

    def _index(self, key, head):
        """Everything this head names now; all of it must be there."""
        tenant, family = self._keys.parse_head(key)
        objects, named = self._world.clear, {}
        for branch in head.branches.values():
            for version in versions_of(branch):
                if not version.manifest:
                    continue
                at = self._keys.manifest_of(tenant, family, version.manifest)
                if at not in objects:
                    self.wrong("I1", f"{key} names {at}, which is absent")
                    continue
                named[at] = len(objects[at])
                parsed = self._parsed(key, version.manifest)
                if self._library.tenants.get(parsed.namespace) != tenant:
                    self.wrong("I9", f"{key} names blocks of namespace {parsed.namespace[:8]}, which is not {tenant}'s")
                for block in parsed.blocks[: version.n]:
                    named.update(block)
        past = self._named.get(key, {})
        for each in past.keys() - named.keys():
            self._uses[each] -= 1
            if self._uses[each] == 0 and self._keys.parse_block(each):
                self._bytes -= past[each]
        for each in named.keys() - past.keys():
            self._uses[each] += 1
            if self._uses[each] == 1 and self._keys.parse_block(each):
                self._bytes += named[each]
                self._named_bytes += named[each]
            if each not in objects or len(objects[each]) != named[each]:
                self.wrong("I1", f"{key} names {each}, which is absent or has another size")
        self._named[key] = named

    def collecting(self, life):
        """This life of a node begins a collection. What is named by now, and what comes to be, is all that it can count."""
        began = self._bytes - self._named_bytes
        self._collections[life] = max(began, self._collections.get(life, began))

    def _over_the_limit(self, life):
        """Whether a collection of this life may have found the bucket over its limit."""
        limit, began = self._world.setup.max_bytes, self._collections.get(life)
        return limit > 0 and began is not None and began + self._named_bytes > limit

    # --- names ---

    def _name(self, key, name, now):
        past = self.names.setdefault(key, [])
        if past:
            branch = self.branches[past[-1][1].branch]
            if branch.gone > now and branch.id != name.branch:
                self.wrong("I3", f"{key} meant a living branch, and was overwritten")
        if name.branch not in self.branches:
            self.wrong("I3", f"{key} was written before its branch")
        else:
            self.branches[name.branch].names.setdefault(key, now)
        past.append((now, name))

    def meant(self, key, start, end):
        """The branches that a name meant at some moment of [start, end], and whether it was free at some moment of it."""
        found, free = [], False
        changes = self.names.get(key, [])
        if not changes or changes[0][0] >= start:
            free = True
        for index, (when, name) in enumerate(changes):
            until = changes[index + 1][0] if index + 1 < len(changes) else float("inf")
            branch = self.branches.get(name.branch)
            if when > end or until < start or branch is None:
                continue
            if branch.lived(max(start, when), min(end, until)):
                found.append(branch)
            if branch.gone <= min(end, until):
                free = True
        return found, free

    # --- in the end ---

    def live(self):
        """Every manifest and block that some head names."""
        return {key for key, uses in self._uses.items() if uses > 0}

    def wrong(self, rule, what):
        self._world.violation(rule, what)
