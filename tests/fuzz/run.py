"""Fuzz parsers: `scripts/fuzz --list` names them, `scripts/fuzz [target ...] --seconds 600` gives each so long.

With atheris (libFuzzer), which sees what code an input reaches; without it with Hypothesis, which does not. Inputs that an
earlier run found worth keeping are where the next one begins (.fuzz/). Exit status 1 where a target failed: what it was given lies
in .fuzz/<target>/ as a file named crash-...; copy it to tests/fuzz/found/<target>/, where the tests try it from then on.
"""

import argparse
import importlib.util
import resource
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE.parents[1] / ".fuzz"
MEMORY = 1 << 30  # that an input may add to what the process has
ONE_INPUT_S = 60  # by the clock: on a machine that does other work one that takes a millisecond was seen to take 18 s


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="*")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=int(time.time()))  # noqa: TID251  a new one each time, and it is printed
    parser.add_argument("--engine", choices=["atheris", "hypothesis"], default="atheris" if has_atheris() else "hypothesis")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process
    args = parser.parse_args()
    sys.path.insert(0, str(HERE))
    if args.here:
        return with_atheris(args.target[0], args) if args.engine == "atheris" else with_hypothesis(args.target[0], args)
    names = subprocess.run(
        [sys.executable, "-c", "from parsers import TARGETS; print(*TARGETS)"], cwd=HERE, check=True, capture_output=True, text=True
    ).stdout.split()
    unknown = set(args.target) - set(names)
    if unknown or args.list:
        say("\n".join(names))
        return 2 if unknown else 0
    failed = []
    for name in args.target or names:
        say(f"--- {name}: {args.engine}, {args.seconds} s, seed {args.seed}")
        command = [
            sys.executable,
            __file__,
            name,
            "--here",
            f"--engine={args.engine}",
            f"--seconds={args.seconds}",
            f"--seed={args.seed}",
        ]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    say(f"failed: {', '.join(failed)}" if failed else "nothing failed")
    return 1 if failed else 0


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def has_atheris():
    return importlib.util.find_spec("atheris") is not None


def bounded():
    """An input that asks for much memory fails at once, with MemoryError, instead of bringing the machine down."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)


def with_atheris(name, args):
    import atheris  # noqa: PLC0415  not everywhere

    with atheris.instrument_imports(include=["kvstore", "tomllib"]):
        from parsers import TARGETS  # noqa: PLC0415  what is imported here is watched
    target, folder = TARGETS[name], CORPUS / name
    corpus, words = folder / "corpus", folder / "words"
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(target.seeds):
        (corpus / f"seed-{index}").write_bytes(seed)
    words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in target.words if word))
    options = [
        f"-max_total_time={args.seconds}",
        f"-seed={args.seed % (1 << 31)}",
        f"-max_len={target.longest}",
        f"-timeout={ONE_INPUT_S}",
        f"-dict={words}",
        f"-artifact_prefix={folder}/",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    bounded()
    atheris.Setup([sys.argv[0], *options, str(corpus)], target.run)
    atheris.Fuzz()  # ends the process


def with_hypothesis(name, args):
    from parsers import TARGETS  # noqa: PLC0415  atheris must come before it
    from parsers.mutation import tried  # noqa: PLC0415  as it

    bounded()
    end, runs = time.monotonic() + args.seconds, 0
    while time.monotonic() < end:
        found = tried(TARGETS[name], seed=args.seed + runs, examples=500)
        runs += 500
        if found is not None:
            data, error = found
            folder = CORPUS / name
            folder.mkdir(parents=True, exist_ok=True)
            (path := folder / f"crash-{len(data)}-{args.seed + runs}").write_bytes(data)
            say(f"{path}: {type(error).__name__}: {error}")
            return 1
    say(f"{runs} inputs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
