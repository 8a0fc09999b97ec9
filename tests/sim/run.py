"""Simulate until the time is over: one round after the other, each with a seed of its own that follows from the first.

python tests/sim/run.py --minutes 10 --seed 7        what scripts/soak runs
python tests/sim/run.py --minutes 10 --sealed        in an encrypted bucket
python tests/sim/run.py --round 7000012              one round again, to the last request
python tests/sim/run.py --round 3 --digest           only the digest of its log
"""

import argparse
import json
import sys
import time
from collections import Counter

from simulation.rounds import setup_of
from simulation.world import simulate

STRIDE = 1_000_000  # rounds of one seed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--round", type=int, help="only this one")
    parser.add_argument("--sealed", action="store_true", help="the bucket is encrypted")
    parser.add_argument("--digest", action="store_true")
    parser.add_argument("--tail", type=int, default=60, help="lines of the log before a violation")
    args = parser.parse_args()
    if args.round is not None:
        result = simulate(args.round, setup_of(args.round, sealed=args.sealed))
        if args.digest:
            say(result.digest)
            return 0
        say(json.dumps(summary([args.round], result.counts, result.violations)))
        return told(result, args.tail, sealed=args.sealed)
    end, number, counts, rounds = time.monotonic() + 60 * args.minutes, args.seed * STRIDE, Counter(), []
    while time.monotonic() < end:
        result = simulate(number, setup_of(number, sealed=args.sealed))
        rounds.append(number)
        counts.update(result.counts)
        if result.violations:
            say(json.dumps(summary(rounds, counts, result.violations)))
            return told(result, args.tail, sealed=args.sealed)
        number += 1
    say(json.dumps(summary(rounds, counts, [])))
    return 0


def summary(rounds, counts, violations):
    operations = sum(counts[outcome] for outcome in ("acknowledged", "failed", "unknown"))
    return {
        "rounds": len(rounds),
        "first": rounds[0],
        "operations": operations,
        **dict(sorted(counts.items())),
        "violations": len(violations),
    }


def told(result, tail, *, sealed):
    """What went wrong, and how to see it again."""
    if not result.violations:
        return 0
    again = f"again: python tests/sim/run.py --round {result.seed}{' --sealed' if sealed else ''}"
    say(*result.tail[-tail:], "", *result.violations, "", again)
    return 1


def say(*lines):
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
