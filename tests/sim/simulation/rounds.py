"""Rounds of a soak: each seed has its own conditions."""

from simulation.wire import Rates
from simulation.world import Setup

SECONDS = 60.0


def setup_of(number, *, sealed=False):
    """As it comes, large, under a limit of bytes, crowded and without older versions, most answers lost, dead heads deleted."""
    setup = Setup(seconds=SECONDS, sealed=sealed)
    match number % 6:
        case 1:
            setup.nodes, setup.users, setup.collectors, setup.history = 5, 16, 3, 1
        case 2:
            setup.max_bytes = 40_000
        case 3:
            setup.think, setup.rest, setup.history = 0.3, 1.5, 0
        case 4:
            setup.think, setup.rates = 0.5, Rates.lossy()
        case 5:
            setup.longest, setup.reap, setup.rest = 15.0, 16.0, 1.0
            setup.rates.twice = 0.2
    return setup
