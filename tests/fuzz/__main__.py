"""Tries new inputs of every target for some time, and prints what came of them as a table.

python -m tests.fuzz --minutes 30 [--targets "WAV header" tar] [--start 1]
"""

import argparse
import sys
import time
import traceback
import warnings
from importlib.util import find_spec

from hypothesis.errors import HypothesisWarning

from tests.fuzz.runs import Counts, fuzz
from tests.fuzz.targets import TARGETS

_COLUMNS = (
    "| target | inputs | accepted | refused | by | minutes | longest | most memory |\n|---|---|---|---|---|---|---|---|"
)


def main() -> int:
    """Runs the targets one after the other; the exit code is 1 if an input was a crash."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all targets together")
    parser.add_argument("--targets", nargs="+", choices=sorted(TARGETS), default=list(TARGETS), metavar="NAME")
    parser.add_argument("--start", type=int, default=int(time.time()), help="which inputs are drawn")
    options = parser.parse_args()
    warnings.simplefilter("error")  # as in the tests
    warnings.simplefilter("ignore", HypothesisWarning)
    num_crashes = 0
    print(f"start {options.start}\n\n{_COLUMNS}", flush=True)
    for name in options.targets:
        if missing := [package for package in TARGETS[name].packages if find_spec(package) is None]:
            print(f"| {name} | left out: {', '.join(missing)} is not installed | | | | | | |", flush=True)
            continue
        counts = Counts()
        try:
            fuzz(TARGETS[name], 60 * options.minutes / len(options.targets), options.start, counts)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc()
            num_crashes += 1
        print(_row(name, counts), flush=True)
    return 1 if num_crashes else 0


def _row(name: str, counts: Counts) -> str:
    by = ", ".join(f"{error} {number}" for error, number in counts.outcomes.most_common() if error != "accepted")
    total, accepted = counts.outcomes.total(), counts.outcomes["accepted"]
    return (
        f"| {name} | {total:,} | {accepted:,} | {total - accepted:,} | {by} | {counts.seconds / 60:.1f} "
        f"| {counts.highest_cpu_s:.2f} s | {counts.highest_bytes >> 20} MiB |"
    )


if __name__ == "__main__":
    sys.exit(main())
