"""The real code with one rule broken. A simulation that does not notice has proved nothing."""

import contextlib
from dataclasses import dataclass
from unittest import mock

import msgspec

from kvstore.errors import Conflict, Gone, Unavailable
from kvstore.lifecycle import collector, marking, sweep
from kvstore.objects import OVERWRITE, Stored, Update
from kvstore.repo import families, heads, names, root, uploads, writer
from kvstore.repo.commit import Commit
from kvstore.repo.heads import Heads, Position
from kvstore.service import commits


@dataclass
class Mutant:
    about: str
    rules: tuple  # the violations it shows itself by
    patches: list
    lossy: bool = False  # answers have to be lost for it to matter
    round: int = 0  # its conditions have to hold for it to matter


def _patch(target, name, value):
    return lambda: mock.patch.object(target, name, value)


_reaper = collector.Reaper


def _hasty(root, now, dry_run):
    """R11: a head is deleted as soon as it is dead."""
    return _reaper(root, now + 1e6, dry_run)


_evict = collector._Collection._evict


async def _half_the_limit(self, live):
    """A bucket that is half full counts as full."""
    return await _evict(self, 2 * live)


_swap = Heads.swap


async def _no_seal(self, key, old, new):
    """A collection that changes nothing but `open` does not write."""
    if old.head.open and not new.open and new.branches == old.head.branches and not new.dead:
        return Position(new, old.etag)
    return await _swap(self, key, old, new)


async def _epoch_from_memory(self, at):
    """R2: the newest epoch this node happens to know, instead of one that is read after the head."""
    if not at.head.open:
        opened = await self._heads.swap(self._key, at, heads.swapped(at.head, self._root.ids.new(), open=True))
        if opened is None:
            return None
        at = opened
    return Position(at.head, at.etag, self._epochs.latest)


async def _add_to_sealed(self, at):
    """R3: a sealed head is not opened first."""
    return Position(at.head, at.etag, (await self._epochs.read()).epoch) if at.epoch is None else at


_read = Heads.read


async def _forgetful(self, key):
    """R8: nobody finds the write ids of earlier attempts."""
    position = await _read(self, key)
    if position is None:
        return None
    return Position(msgspec.structs.replace(position.head, recent=()), position.etag, position.epoch)


def _fresh(self, name, epoch):
    """R1: a block that is known is taken at any age."""
    return self._known.get(name.tier_key)


_claim = names.Names.claim


async def _blind_claim(self, key, session, family, branch, alive):
    """A claim does not look at whom it replaces."""

    async def nobody(name):
        return False

    await _claim(self, key, session, family, branch, nobody)


async def _impatient(self, key, body, mode):
    """R8: an answer that is lost is a failure."""
    answer = await self.store.put(key, body, mode)
    if isinstance(answer, Stored):
        return answer.etag
    if "/heads/" in key and isinstance(mode, Update):
        raise Conflict("somebody was faster", current=-1)
    return None


async def _overwrite(self, key, old, new):
    """A swap that does not say what it replaces."""
    answer = await self._root.store.put(key, heads.dump(new, key), OVERWRITE)
    self._cache.pop(key, None)
    return Position(new, answer.etag, old.epoch)


def _current_only(branch):
    """R4: a collection does not look at older versions."""
    return heads.versions_of(branch)[:1]


def _expired_by_any_clock(branch, now):
    """A clock that is a minute fast decides who lives."""
    return not branch.pinned and 0 < branch.expires <= now + 60


async def _whoever_has_the_name(self, place, branch):
    """I4: a commit lands in the session that has the id now."""
    return await self._named(self._finder.key(*place))


async def _by_its_number(self, have):
    """A promise that was not kept leaves its number to somebody else's version, which is taken for it."""
    return True


def _any_id(promise, ids):
    """I4: how a branch id begins does not say who made it."""
    return ids.new()


async def _not_that_one(self, place, name, promise):
    """I4: only how a branch id begins says which promise a session has kept."""
    return False


_meant = writer.Writer._meant


async def _given_up(self, place, branch):
    """I3: what nothing tells of yet is taken for deleted."""
    try:
        return await _meant(self, place, branch)
    except Unavailable as error:
        raise Gone(error.message) from None


async def _forgetting(self):
    """A promise ends with the life that gave it."""
    return 0


MUTANTS = {
    "no_seal": Mutant("a collector only reads heads", ("I1",), [_patch(Heads, "swap", _no_seal)]),
    "epoch_first": Mutant("the epoch is not read after the head", ("I1",), [_patch(families._Group, "_ready", _epoch_from_memory)]),
    "commit_on_sealed": Mutant("opening is combined with adding", ("I1",), [_patch(families._Group, "_ready", _add_to_sealed)]),
    "keep_1": Mutant("deletes generations up to E-1", ("I1",), [_patch(sweep, "YOUNG", 1), _patch(collector, "YOUNG", 1)]),
    "any_age": Mutant("an added block may be of any age", ("I1",), [_patch(uploads.Uploads, "_fresh", _fresh)]),
    "history_unmarked": Mutant("history entries are not marked", ("I1",), [_patch(marking, "versions_of", _current_only)]),
    "no_id_check": Mutant("a retry does not look for its id", ("I2", "R8"), [_patch(Heads, "read", _forgetful)], lossy=True),
    "report_failed": Mutant("a lost answer is called a failure", ("I1", "I2"), [_patch(root.Root, "attempt", _impatient)]),
    "blind_swap": Mutant("a swap does not name what it replaces", ("R8", "I2", "I1"), [_patch(Heads, "swap", _overwrite)]),
    "blind_claim": Mutant("a claim does not name the value it judged", ("I3",), [_patch(names.Names, "claim", _blind_claim)]),
    "any_session": Mutant(
        "a commit does not look which session it was built on",
        ("I4", "I2"),
        [_patch(writer.Writer, "_meant", _whoever_has_the_name)],
    ),
    "any_base": Mutant(
        "a commit does not look whether its base is what it takes it for", ("I2",), [_patch(Commit, "_expected", _by_its_number)]
    ),
    "nameless_promise": Mutant(
        "nothing tells which session was made for a promise",
        ("I3",),
        [_patch(writer, "made_for", _any_id), _patch(writer.Writer, "_took_in", _not_that_one)],
    ),
    "taken_in_unseen": Mutant(
        "a session that was there first does not tell which promise it kept",
        ("I3",),
        [_patch(writer.Writer, "_took_in", _not_that_one)],
    ),
    "given_up": Mutant(
        "a promise that is yet to be kept is taken for a deleted session",
        ("I3",),
        [_patch(writer.Writer, "_meant", _given_up)],
        round=3,
    ),
    "blind_expire": Mutant(
        "expiry by a clock that is a minute fast", ("I5",), [_patch(collector, "expired", _expired_by_any_clock)]
    ),
    "reap_early": Mutant("a head is deleted as soon as it is dead", ("I6", "R8"), [_patch(collector, "Reaper", _hasty)], round=5),
    "promise_forgotten": Mutant(
        "a node does not take up what it promised before it died", ("I2", "I3"), [_patch(commits.Commits, "replay", _forgetting)]
    ),
    "evict_early": Mutant(
        "sessions go before the bucket is full", ("I5",), [_patch(collector._Collection, "_evict", _half_the_limit)], round=2
    ),
}


@contextlib.contextmanager
def broken(name):
    """The code with this mutant in it."""
    with contextlib.ExitStack() as stack:
        for patch in MUTANTS[name].patches:
            stack.enter_context(patch())
        yield MUTANTS[name]
