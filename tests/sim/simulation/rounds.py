"""Rounds of a soak: each seed has its own conditions."""

from simulation.wire import Rates
from simulation.world import Setup

SECONDS = 60.0


def setup_of(number):
    """Rounds differ: as it comes, large, under a limit of bytes, crowded and without older versions, with most answers lost."""
    setup = Setup(seconds=SECONDS)
    match number % 5:
        case 1:
            setup.nodes, setup.users, setup.collectors, setup.history = 5, 16, 3, 1
        case 2:
            setup.max_bytes = 40_000
        case 3:
            setup.think, setup.rest, setup.history = 0.3, 1.5, 0
        case 4:
            setup.think, setup.rates = 0.5, Rates.lossy()
    return setup
