"""Every instance that is checked. `full` runs before a change of the protocol is accepted, `small` in the tests."""

from typing import Any, TypeAlias

import msgspec

from protocol_model.config import Config
from protocol_model.explore import Machine
from protocol_model.merge import MergeConfig, MergeMachine
from protocol_model.names import NameConfig, NameMachine
from protocol_model.sessions import Sessions
from protocol_model.state import Place

AnyConfig: TypeAlias = Config | NameConfig | MergeConfig


class Scenario(msgspec.Struct, frozen=True):
    """An instance at its full bounds, what makes it small enough for every test run, and what has to happen in it."""

    full: AnyConfig
    shrink: dict[str, object]
    does: frozenset[str]

    @property
    def small(self) -> AnyConfig:
        """Still large enough to catch every mutant of this scenario."""
        return self.full.but(**self.shrink)


def machine(config: AnyConfig) -> Machine[Any]:
    """The transition system of an instance."""
    match config:
        case NameConfig():
            return NameMachine(config)
        case MergeConfig():
            return MergeMachine(config)
        case Config():
            return Sessions(config)


ONE = (Place(0, 0),)
TWO_BRANCHES = (Place(0, 0), Place(0, 1))
ONE_EACH = (Place(0, 0), Place(1, 0))
_WITH_MANIFESTS = Config(about="manifests are objects; two collectors", writers=ONE, collectors=2, manifests=True, max_epoch=4)
_LOSSY = Config(
    about="lost answers and late requests", writers=TWO_BRANCHES, branches=2, prefixes=1, lost=True, ring=3, max_epoch=2
)

SCENARIOS: dict[str, Scenario] = {
    "base": Scenario(
        Config(about="two writers on one branch, one collector, rewind and drop", edits=True),
        {"max_epoch": 3},
        frozenset(
            {"GET head", "HEAD finds block", "swap head, keeps its epoch", "seals head", "decides to delete", "swap: rewind"}
        ),
    ),
    "families": Scenario(
        Config(about="two families, a writer each", families=2, writers=ONE_EACH, edits=True, prefixes=1),
        {"max_epoch": 3},
        frozenset({"swap head", "seals head", "decides to delete"}),
    ),
    "forks": Scenario(
        Config(about="fork, rewind and drop on two branches", branches=2, writers=ONE, edits=True, max_epoch=4),
        {"max_epoch": 2},
        frozenset({"swap: fork into", "swap: drop", "decides to delete"}),
    ),
    "collectors": Scenario(
        Config(about="two collectors", prefixes=1, writers=ONE, collectors=2, edits=True, max_epoch=7),
        {"max_epoch": 4},
        frozenset({"seals head", "reads head", "decides to delete"}),
    ),
    "create": Scenario(
        Config(about="two writers create the family", prefixes=1, missing=frozenset({0}), edits=True, max_epoch=7),
        {"max_epoch": 4},
        frozenset({"PUT head, empty, If-None-Match", "swap head"}),
    ),
    "copies": Scenario(
        Config(about="COPY as a way to add", families=2, writers=ONE_EACH, edits=True, copies=True, prefixes=1),
        {"max_epoch": 3},
        frozenset({"COPY into block", "COPY, 404, commit is cut"}),
    ),
    "manifests": Scenario(_WITH_MANIFESTS, {"max_epoch": 3}, frozenset({"PUT manifest", "GET manifest, 404", "decides to delete"})),
    "manifests2": Scenario(
        _WITH_MANIFESTS.but(
            about="manifests are objects; two branches, two writers",
            writers=TWO_BRANCHES,
            branches=2,
            prefixes=1,
            collectors=1,
            edits=True,
        ),
        {"max_epoch": 3},
        frozenset({"PUT manifest", "swap: fork into", "decides to delete"}),
    ),
    "lost": Scenario(
        _LOSSY,
        {"ring": 2, "commits": 1},
        frozenset({"swap head, answer lost", "delivers a late swap", "finds its write id, acknowledges", "reports Unavailable"}),
    ),
    "ring": Scenario(
        _LOSSY.but(about="as lost; a head remembers only its last swap", ring=1),
        {"commits": 1},
        frozenset({"finds its write id, acknowledges", "reports Unavailable", "seals head"}),
    ),
    "ttl": Scenario(
        Config(about="expiry against resume", prefixes=1, writers=ONE, ttl=True, edits=True, max_epoch=4),
        {},
        frozenset({"GET head, judges expired", "swap: expire", "swap: resume and renew", "seals head"}),
    ),
    "reap": Scenario(
        Config(
            about="empty heads are killed, dead ones deleted",
            prefixes=1,
            missing=frozenset({0}),
            reap=True,
            edits=True,
            max_epoch=6,
        ),
        {"max_epoch": 3},
        frozenset({"swap: kill head", "decides to DELETE dead head", "delivers a DELETE of head", "swap head, 412"}),
    ),
    "history": Scenario(
        Config(about="a branch names its previous version", writers=ONE, edits=True, history=True, max_epoch=4),
        {"max_epoch": 3},
        frozenset({"swap: restore the version before", "swap: rewind", "keeps block", "decides to delete"}),
    ),
    "history2": Scenario(
        Config(about="as history; manifests are objects", writers=ONE, edits=True, history=True, manifests=True, max_epoch=3),
        {"max_epoch": 2},
        frozenset({"swap: restore the version before", "GET manifest", "decides to delete"}),
    ),
    "names": Scenario(
        NameConfig(about="one name: creators, deleters, committers, expiry, reaper", incarnations=3),
        {"incarnations": 2},
        frozenset({"412, the name is taken", "head is dead, starts again", "delete", "commit", "delete: Gone", "drops session"}),
    ),
    "merge": Scenario(
        MergeConfig(
            about="two writers of different shards, rewinds, lost answers",
            shards=(1, 3),
            length=3,
            versions=6,
            operations=3,
        ),
        {"length": 2, "versions": 4, "operations": 2},
        frozenset(
            {
                "GET head: contained",
                "GET head: Conflict",
                "finds its write id, acknowledges",
                "delivers a late swap",
                "swap: rewind",
            }
        ),
    ),
    "groups": Scenario(
        MergeConfig(about="a group over two branches, another writer on one", branches=2, charge=((0, 1), (1,)), versions=4),
        {"charge": ((0, 1), (0, 1)), "versions": 3, "operations": 1},
        frozenset(
            {
                "GET head: to be written, to be written",
                "GET head: contained, to be written",
                "GET head: Conflict, to be written",
                "finds its write id, acknowledges",
            }
        ),
    ),
    "repeats": Scenario(
        MergeConfig(
            about="as groups; nodes die, and each caller asks again",
            branches=2,
            charge=((0, 1), (1,)),
            versions=4,
            history=3,
            dies=True,
        ),
        {"versions": 3, "operations": 1},
        frozenset(
            {
                "dies, and each caller asks again",
                "finds the version it made, acknowledges",
                "delivers a late swap",
                "swap: rewind",
            }
        ),
    ),
}

WALK = Config(
    about="for random walks: too large to exhaust",
    families=3,
    branches=2,
    missing=frozenset({2}),
    writers=(Place(0, 0), Place(0, 1), Place(1, 0), Place(2, 0)),
    collectors=2,
    edits=True,
    manifests=True,
    copies=True,
    ttl=True,
    reap=True,
    max_epoch=40,
)
