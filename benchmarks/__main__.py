"""Lists and runs the benchmarks.

python -m benchmarks list
python -m benchmarks run NAME [OPTION ...]     # `run NAME --help` shows the options
python -m benchmarks all --quick               # tries all that need only the demo corpus
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.catalogue import Benchmark, catalogue
from benchmarks.harness.children import run_peer, search_path
from benchmarks.harness.repository import REPOSITORY

DEMO = REPOSITORY / "manifests" / "demo"


def main(argv: Sequence[str] | None = None) -> int:
    """Lists, runs or tries benchmarks."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names and claims")
    run = commands.add_parser("run", help="one benchmark, with its own options", add_help=False)
    run.add_argument("name")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    every = commands.add_parser("all", help="tries all that need only the demo corpus")
    every.add_argument("--quick", action="store_true", required=True, help="there is no other way to run all of them")
    arguments = parser.parse_args(argv)
    found = catalogue()
    if arguments.command == "list":
        return list_benchmarks(found)
    if arguments.command == "all":
        return try_all(found)
    if arguments.name not in found:
        parser.error(f"{arguments.name}: no such benchmark; there are {', '.join(found)}")
    os.environ["PYTHONPATH"] = search_path()
    os.execv(sys.executable, [sys.executable, *found[arguments.name].command(arguments.arguments)])


def list_benchmarks(found: dict[str, Benchmark]) -> int:
    """Prints the benchmarks by folder."""
    folder = None
    for name, benchmark in found.items():
        if benchmark.path.parent != folder:
            folder = benchmark.path.parent
            print(f"{folder.relative_to(REPOSITORY).as_posix()}/")
        print(f"  {name:15} {benchmark.claim}")
    return 0


def try_all(found: dict[str, Benchmark]) -> int:
    """Runs benchmarks on the demo corpus; returns 1 if one of them fails."""
    failed = []
    with tempfile.TemporaryDirectory() as directory:
        manifests = demo_manifests(Path(directory))
        for name, benchmark in found.items():
            if benchmark.quick is None:
                print(f"{name}: not tried, because it needs more than the demo corpus")
                continue
            started = time.perf_counter()
            command = benchmark.command([argument.format(**manifests) for argument in benchmark.quick])
            try:
                run_peer([sys.executable, *command], cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": search_path()})
            except SystemExit as error:
                failed.append(name)
                print(f"{name}: failed: {error}", flush=True)
            else:
                print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    return int(bool(failed))


def demo_manifests(directory: Path) -> dict[str, Path]:
    """Writes manifests of the demo corpus; returns their paths by the names in `QUICK`."""
    manifests = {name: directory / f"{name}.json" for name in ("speech", "noise")}
    for name, path in manifests.items():
        rows = [json.loads(line) for line in (DEMO / f"{name}.json").read_text(encoding="utf-8").splitlines()]
        rows = [{**row, "audio_filepath": str(DEMO / row["audio_filepath"])} for row in rows]
        # One file is missing on purpose, as an example of a reject.
        rows = [row for row in rows if Path(row["audio_filepath"]).exists()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return manifests


if __name__ == "__main__":
    sys.exit(main())
