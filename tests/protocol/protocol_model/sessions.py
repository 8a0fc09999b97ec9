"""The session machine: commits, forks, expiry, deletion and collection on one bucket."""

from protocol_model.collectors import collector_steps
from protocol_model.config import Config
from protocol_model.owners import owner_steps
from protocol_model.state import Collector, Head, State, Writer, named
from protocol_model.swaps import Steps
from protocol_model.writers import writer_steps


class Sessions:
    """One instance. Invariants I1, I2, I5 and I6 of docs/ordering.md."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def initial(self) -> State:
        """An initialised root; heads empty and sealed, except those that do not exist yet."""
        c = self.config
        empty = Head(open=False, branches=(None,) * c.branches)
        heads = tuple(None if f in c.missing else empty for f in range(c.families))
        sent = frozenset(range(c.families)) - c.missing if c.reap else frozenset()
        return State(0, heads, (Writer(),) * len(c.writers), (Collector(),) * c.collectors, sent=sent)

    def steps(self, s: State) -> Steps:
        """Every request that may be the next to take effect."""
        for i in range(len(s.writers)):
            yield from writer_steps(s, self.config, i)
        for i in range(len(s.collectors)):
            yield from collector_steps(s, self.config, i)
        yield from owner_steps(s, self.config)

    def violation(self, s: State) -> str:
        """What is wrong, or nothing."""
        if s.broken:
            return s.broken
        for family, head in enumerate(s.heads):
            if s.doomed:
                for thing in named(head):
                    if thing in s.doomed:
                        return f"head {family} names {thing}, which a DELETE on its way may remove"
            if family in s.doomed_heads and any(named(head)):
                return f"head {family} is in use and a DELETE on its way may remove it"
        return ""
