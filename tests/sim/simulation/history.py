"""What was asked, what was answered, and whether that can be true."""

from dataclasses import dataclass, field
from itertools import pairwise

from kvstore.errors import AlreadyExists, Conflict, Gone, KVTierError, NotFound, Overloaded, TooManyBranches, Unavailable
from kvstore.repo.branches import is_promise, means
from kvstore.repo.heads import versions_of

ACK, NO, UNKNOWN = "acknowledged", "failed", "unknown"
NO_BYTES = "bytes of this commit's first block"
PENDING = "promise_pending"
DECIDED = {"conflict", "gone", "already_exists", "not_found", "invalid", "too_many_branches"}  # what ends a promise


@dataclass
class Op:
    """Something a user wanted. Attempts under one write id are one operation."""

    id: int
    kind: str
    tenant: str
    session: str
    key: str  # of the name
    start: float
    base: int = 0
    built_on: tuple = ()  # the tokens of `base`
    says_how: bool = False  # it says how `base` ends
    tokens: tuple = ()
    branch: str = ""  # the branch that `base` is a version of, or how its id was promised to begin
    follows: int = -1  # the operation that was promised that version
    source: str = ""  # key of the name of the session that is forked
    versioned: bool = False  # it names a version, which may be what is gone
    durability: str = "bucket"
    lives: list = field(default_factory=list)  # the lives of nodes that worked on it
    tries: int = 0
    end: float = float("inf")
    outcome: str = ""
    answer: object = None
    decided: bool = False  # of a promise: it landed, or the protocol refused it
    refused: bool = False  # it was refused, at least once
    unmade: bool = False  # nothing was found of the promise that it was built on, when it last looked
    landed: set = field(default_factory=set)  # branches that it is in, each with a life that was told so

    def __str__(self):
        said = self.answer.kind if isinstance(self.answer, KVTierError) else ""
        lives = ",".join(map(str, self.lives))
        return f"op {self.id} ({self.kind} {self.tenant}/{self.session} base {self.base}, {lives}: {self.outcome} {said})"


class History:
    def __init__(self, world):
        self._world = world
        self.ops = {}

    def begin(self, kind, tenant, session, **fields):
        world = self._world
        namespace = world.library.namespaces[tenant].id
        op = Op(len(self.ops), kind, tenant, session, world.keys.name(tenant, session, namespace, "main"), world.now, **fields)
        self.ops[op.id] = op
        return op

    def end(self, op, answer):
        """Its answer: a value, an error, or None where the node died before it gave one."""
        op.end, op.answer = self._world.now, answer
        if answer is None or self._undecided(op, answer):
            op.outcome = UNKNOWN
        elif isinstance(answer, BaseException):
            op.outcome = NO
            self._refused(op, answer, op.end)
        else:
            op.outcome = ACK
            self._acknowledged(op, answer)
        self._world.count(op.outcome)
        self._world.note(f"{op}")

    def _undecided(self, op, answer):
        """Whether it may take effect in spite of its answer."""
        match answer:
            case Unavailable() if answer.kind != PENDING:
                return answer.kind in {"outcome_unknown", "timeout"}
            case Conflict() | Gone() | Unavailable() if op.kind == "commit" and op.tries > 1 and len(set(op.lives)) > 1:
                # An earlier try may be under way on another node, and lands once the name is free, or the promise kept that it was
                # built on. On one life of a node they are one.
                early = answer.facts["current"] < op.base if isinstance(answer, Conflict) else is_promise(op.branch)
                return (op.base == 0 and isinstance(answer, Conflict)) or (op.follows >= 0 and early)
        return False

    def deleting(self, life, branch, now):
        """Whether somebody asked this life of a node to delete the branch."""
        return any(
            op.kind == "delete" and life in op.lives and op.key in branch.names and op.start <= now and op.end >= branch.born
            for op in self.ops.values()
        )

    # --- at once ---

    def _refused(self, op, error, end, began=None):
        truth = self._world.truth
        found, free = truth.meant(op.key, op.start, end)
        match error:
            case Conflict() if "on this node" in error.message:
                true = True  # it was promised a version that is still on its way
            case Conflict():
                seqs = {seq for branch in found for seq in branch.current(op.start, end)}
                other = any(op.base in each.versions and each.versions[op.base].tokens != op.built_on for each in found)
                true = bool(seqs - {op.base}) or free or len(found) > 1 or (op.base > 0 and other)
            case NotFound() if NO_BYTES in error.message:
                true = op.kind in {"commit", "detach"}
            case Gone() if op.kind == "commit" and op.branch:
                true = self._over(op, end)
            case Unavailable() if error.kind == PENDING:
                true = is_promise(op.branch) and (
                    self._lost(self.ops[op.follows]) or not self._standing(op, began or op.start, end)
                )
            case NotFound() | Gone():
                source = op.key if op.source == "" else op.source
                gone = truth.meant(source, op.start, end)[1]
                true = gone or (op.kind == "rewind" and op.versioned)
                true |= op.kind == "detach" and (isinstance(error, NotFound) or self._came_and_went(op, end))
                true |= op.kind == "fork" and isinstance(error, Gone) and self._came_and_went(op, end)
                true |= isinstance(error, Gone) and op.follows >= 0 and self._lost(self.ops[op.follows])
            case AlreadyExists():
                true = bool(found)
            case Unavailable() | Overloaded() | TooManyBranches():
                true = True
            case _:
                true = False
        if not true:
            self._world.violation("I2" if isinstance(error, Conflict) else "I3", f"{op} was told {error!r}")

    def _came_and_went(self, op, end):
        """Whether a session that got this name meanwhile is over again, before it could be shown."""
        return any(
            branch.names.get(op.key, -1) >= op.start and branch.gone <= end for branch in self._world.truth.branches.values()
        )

    def _over(self, op, end):
        """Whether the session that a commit was built on is no more, or never will be."""
        truth = self._world.truth
        if not is_promise(op.branch):
            return truth.branches[op.branch].gone <= end
        if self._lost(self.ops[op.follows]):
            return True
        named = [branch for branch in map(truth.branches.get, self._meant_by(op)) if op.key in branch.names]
        over = any(branch.gone <= end for branch in named)
        return over and not self._standing(op, op.start, end)

    def _standing(self, op, start, end):
        """Whether the session that was promised is there throughout, and says so to the life that was asked."""
        truth, maker = self._world.truth, self._maker(op)
        for branch in map(truth.branches.get, self._meant_by(op)):
            if op.key not in branch.names or branch.names[op.key] > start or branch.gone <= end:
                continue
            itself = (branch.id, op.lives[-1]) in maker.landed
            if itself or means(branch.id, op.branch) or self._remembers(branch, maker, start):
                return True
        return False

    def _remembers(self, branch, op, start):
        """Whether a session keeps a version that an operation had made by then."""
        kept = {version.seq for version in versions_of(branch.last)} & {seq for when, seq in branch.timeline if when <= start}
        return any(branch.versions[seq].op == op.id for seq in kept if seq)

    def _lost(self, op):
        """Whether a promise could not be kept, or one that it was built on."""
        return op.refused or op.unmade or (op.follows >= 0 and self._lost(self.ops[op.follows]))

    def _maker(self, op):
        """The operation that was promised to make the session that this one was built on."""
        while op.base:
            op = self.ops[op.follows]
        return op

    def _acknowledged(self, op, answer):
        if op.kind == "commit" and answer.durability == "bucket":
            self._committed(op, answer)
        elif op.kind in {"create", "fork", "detach", "get", "touch", "pin", "rewind", "restore"}:
            self._shown(op, answer)
        elif op.kind == "delete" and not self._world.truth.meant(op.key, op.start, op.end)[1]:
            self._world.violation("I4", f"{op}: the session is still there")

    def committed(self, op, receipt, life):
        """What the bucket acknowledged, also behind a caller who had its answer already."""
        op.decided, op.unmade = True, False
        op.landed.add((receipt.branch, life))
        self._committed(op, receipt)

    def dropped(self, op, error, began):
        """A promise could not be kept, or not yet, and whoever was given it does not hear of it."""
        if op.durability == "bucket":
            return
        op.unmade = error.kind == PENDING
        if op.unmade or error.kind in DECIDED:
            op.refused |= not op.unmade
            op.decided |= op.refused
            self._refused(op, error, self._world.now, began)

    def _committed(self, op, receipt):
        kept = op.tokens[: receipt.tokens]
        truth = self._world.truth
        found, _ = truth.meant(op.key, op.start, self._world.now)
        made = [truth.branches[effect.branch] for effect in truth.effects.get(op.id, ())]  # it may be over before it has its name
        for branch in (*found, *(each for each in made if op.key in each.names)):
            content = branch.versions.get(receipt.version)
            if content is None and not (receipt.version == 0 == op.base):
                continue
            held = content.tokens if content is not None else ()
            if held == kept and (receipt.cut or kept == op.tokens):
                return
            if receipt.cut and held[: len(kept)] == kept:
                return
            if receipt.version == op.base and any(each.tokens[: len(kept)] == kept for each in branch.versions.values()):
                return  # a longer version holds it, and the caller keeps the base it had
        self._world.violation(
            "I2", f"{op} was acknowledged as version {receipt.version} ({receipt.tokens} tokens), which is not so"
        )

    def _shown(self, op, session):
        branch = self._world.truth.branches.get(session.branch)
        key = op.key
        if branch is None or key not in branch.names or session.version not in branch.current(op.start, op.end):
            self._world.violation(
                "I3", f"{op} was shown version {session.version} of {session.branch[:8]}, which was not current then"
            )

    # --- in the end ---

    def judge(self):
        truth = self._world.truth
        for op in self.ops.values():
            if op.kind != "commit":
                continue
            if op.outcome == ACK and op.durability == "nvme" and not (op.decided or op.unmade or self._in_vain(op)):
                self._world.violation("I2", f"{op} was promised, and neither landed nor was refused")
            effects = [
                effect
                for effect in truth.effects.get(op.id, ())
                if op.key in truth.branches[effect.branch].names and not self._detached(op, effect)
            ]
            if len(effects) > 1 and not self._forgotten(op, effects):
                self._world.violation("I2", f"{op} took effect {len(effects)} times: {[effect[:3] for effect in effects]}")
            lasting = [effect for effect in effects if truth.branches[effect.branch].gone > op.end]
            if lasting and op.outcome == NO and op.durability == "bucket":
                self._world.violation("I2", f"{op} was refused, and took effect as version {lasting[0].seq}")
            for effect in effects:
                if op.base and effect.branch not in self._meant_by(op):
                    self._world.violation("I4", f"{op} was built on {op.branch[:8]}, and took effect in {effect.branch[:8]}")
        self._reachable()

    def _meant_by(self, op):
        """The branches that an operation may have been built on: several, where a promise made its session more than once."""
        if not is_promise(op.branch):
            return {op.branch}
        return {branch for branch in self._world.truth.branches if means(branch, op.branch)} | {
            branch for branch, _ in self._maker(op).landed
        }

    def _in_vain(self, op):
        """Whether it may have been built on a promise that was dropped, and went with it."""
        return any(
            other.key == op.key and other.durability != "bucket" and other.base < op.base and set(other.lives) & set(op.lives)
            for other in self.ops.values()
        )

    def _detached(self, op, effect):
        """Whether a fork brought the version there, with its labels, by way of another session."""
        return effect.seq == 1 and any(
            other.kind == "detach" and other.key == op.key and effect.life in other.lives and other.start <= effect.when
            for other in self.ops.values()
        )

    def _forgotten(self, op, effects):
        """Whether no node can know of the earlier effects: those sessions are gone, and their name has meant another one since."""
        for earlier, later in pairwise(effects):
            meant = [name.branch for when, name in self._world.truth.names[op.key] if when < later.when]
            if self._world.truth.branches[earlier.branch].gone > later.when or meant[-1:] == [earlier.branch]:
                return False
        return True

    def _reachable(self):
        truth = self._world.truth
        for branch in truth.branches.values():
            for key in branch.names:
                if branch.gone == float("inf") and truth.names[key][-1][1].branch != branch.id:
                    self._world.violation("I3", f"branch {branch.id[:8]} lives, and {key} means another")
