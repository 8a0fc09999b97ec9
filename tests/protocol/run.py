"""Check the protocol: exhaust every scenario at its full bounds, and see every mutant fail.

python tests/protocol/run.py --all                       everything; what CI and a change of the protocol need
python tests/protocol/run.py base forks                  these scenarios
python tests/protocol/run.py --mutant no_seal            one mutant, with the shortest way to disaster
python tests/protocol/run.py --walk 1000000 --seed 7     random walks through an instance too large to exhaust
"""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from protocol_model.explore import Verdict, explore, walk
from protocol_model.mutants import MUTANTS
from protocol_model.scenarios import SCENARIOS, WALK, machine


def check(scenario: str) -> tuple[Verdict, float]:
    """A scenario at its full bounds, and the seconds it took."""
    return _timed(scenario, "")


def catch(mutant: str) -> tuple[Verdict, float]:
    """A mutant in its scenario, and the seconds it took."""
    return _timed(MUTANTS[mutant].scenario, mutant)


def _timed(scenario: str, mutant: str) -> tuple[Verdict, float]:
    config = SCENARIOS[scenario].full
    started = time.monotonic()
    verdict = explore(machine(config.but(rules=MUTANTS[mutant].rules) if mutant else config))
    return verdict, time.monotonic() - started


def say(*lines: str) -> None:
    """To standard output, at once."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def report(scenario: str, mutant: str, verdict: Verdict, seconds: float) -> None:
    """One line."""
    outcome = verdict.violation or ("safe" if verdict.complete else "no violation, not complete")
    say(f"{scenario:10} {mutant or '-':17} {verdict.states:9,} states {seconds:6.1f} s  {outcome}")


def main() -> int:
    """0 if every scenario is safe and every mutant fails as it has to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="*", help=", ".join(SCENARIOS))
    parser.add_argument("--mutant", action="append", default=[], choices=MUTANTS, metavar="NAME", help=", ".join(MUTANTS))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--walk", type=int, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := set(args.scenario) - set(SCENARIOS):
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}")
    if args.walk:
        verdict = walk(machine(WALK), args.seed, args.walk)
        say(f"{verdict.states:,} steps, seed {args.seed}: {verdict.violation or 'no violation'}", *verdict.trace)
        return 1 if verdict.violation else 0
    scenarios = list(SCENARIOS) if args.all else args.scenario
    mutants = list(MUTANTS) if args.all else args.mutant
    good = True
    with ProcessPoolExecutor(args.jobs) as pool:
        for name, (verdict, seconds) in zip(scenarios, pool.map(check, scenarios), strict=True):
            report(name, "", verdict, seconds)
            good &= verdict.complete
        for name, (verdict, seconds) in zip(mutants, pool.map(catch, mutants), strict=True):
            report(MUTANTS[name].scenario, name, verdict, seconds)
            good &= MUTANTS[name].caught_by in verdict.violation
            if not args.all:
                say(*(f"  {i:3}. {line}" for i, line in enumerate(verdict.trace, 1)))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
