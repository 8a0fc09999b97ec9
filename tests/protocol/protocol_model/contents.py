"""What a commit does with what it finds stored: step 6, as pure functions over the versions of a branch."""

from typing import TypeAlias

from protocol_model.rules import Rules
from protocol_model.state import Value, replace


class Block(Value, frozen=True):
    """A token, and a bit for each shard that is stored."""

    token: int
    shards: int

    def __str__(self) -> str:
        return f"{'abc'[self.token]}{self.shards}"


Content: TypeAlias = tuple[Block, ...]
Versions: TypeAlias = tuple[Content, ...]  # of a branch, oldest first; the index is the seq


def tokens(content: Content) -> tuple[int, ...]:
    """Without the shards."""
    return tuple(b.token for b in content)


def row(content: Content) -> str:
    """For a reader."""
    return " ".join(map(str, content)) or "empty"


def extends(longer: Content, shorter: Content) -> bool:
    """Whether `shorter` is a prefix, by tokens."""
    return tokens(longer[: len(shorter)]) == tokens(shorter)


def common(a: Content, b: Content) -> int:
    """Length of the common prefix, by tokens."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x.token != y.token), min(len(a), len(b)))


def covers(stored: Content, mine: Content) -> bool:
    """Whether every block of `mine` is there, with all its shards."""
    return extends(stored, mine) and all(b.shards & ~a.shards == 0 for a, b in zip(stored, mine, strict=False))


def with_copies(content: Content, other: Content) -> Content:
    """`content`; where `other` has the same prefix, with its shards too."""
    same = common(content, other)
    return (*(replace(a, shards=a.shards | b.shards) for a, b in zip(content[:same], other, strict=False)), *content[same:])


class Answer(Value, frozen=True):
    """What becomes of a commit: it is there already, it may be written like this, or neither."""

    contained: bool = False
    write: Content | None = None


CONFLICT = Answer()


def answer(versions: Versions, history: int, base: int, mine: Content, rules: Rules) -> Answer:
    """Step 6. The head shows the current version and `history` older ones; `base` is the seq the commit was built on."""
    stored, current = versions[-1], len(versions) - 1
    edited = Answer(write=with_copies(mine, stored) if rules.keeps_others_copies else mine)
    if base == current:  # an edited or shortened continuation is an edit, not a conflict
        return Answer(contained=True) if covers(stored, mine) and len(stored) == len(mine) else edited
    if _contained(stored, mine, rules):
        return Answer(contained=True)
    if extends(stored, mine):
        return Answer(write=with_copies(stored, mine))
    visible = base >= current - history
    if not rules.stale_base_conflicts or (visible and extends(mine, stored) and _kept(versions, base, rules)):
        return edited
    return CONFLICT


def _contained(stored: Content, mine: Content, rules: Rules) -> bool:
    if not rules.contained_compares_tokens:
        return len(stored) >= len(mine)
    return covers(stored, mine) or (extends(stored, mine) and not rules.contained_compares_shards)


def _kept(versions: Versions, base: int, rules: Rules) -> bool:
    """Whether the current version extends the base, and every version between extends the one before it: nobody rewound."""
    if not rules.redo_looks_at_base:
        return True
    if not rules.redo_looks_between:
        return extends(versions[-1], versions[base])
    return all(extends(versions[i + 1], versions[i]) for i in range(base, len(versions) - 1))


def judge(versions: Versions, new: Content, base: int, known: Content) -> str:
    """What a swap that adds version `new` destroys or brings back, if its author knew version `base` as `known`.

    Ghost: it sees all versions, and does not know the rules.
    """
    stored = versions[-1]
    same = common(stored, new)
    if same < len(stored) and tokens(known) != tokens(stored):
        return f"version {len(versions) - 1} was overwritten by somebody who had not seen it"
    if any(a.shards & ~b.shards for a, b in zip(stored[:same], new, strict=False)):
        return f"copies named by version {len(versions) - 1} were dropped"
    for seq in range(base + 1, len(versions)):
        removed_from = common(versions[seq - 1], versions[seq])
        back = common(versions[seq - 1], new)
        if removed_from < back and same < back:
            return f"what version {seq} removed came back by somebody who had not seen that"
    return ""
