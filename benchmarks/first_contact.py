"""Runs the 84 command lines and five programs of a newcomer in a checkout, and compares two checkouts.

    ../old/.venv/bin/python -m benchmarks.first_contact --checkout ../old -o old.json
    python -m benchmarks.first_contact -o new.json
    python -m benchmarks.first_contact --table old.json new.json

The lines, and what each has to say, are those of the checkout's own `tests/cli/first_contact`: where the command line
has changed, each version is run as its own documentation says. The table compares lines by their number. Each runs in
a process of its own, which is forked after the large dependencies were imported, and in a new copy of the newcomer's
folder, whose corpora and checkpoint were made by the same checkout. The help is timed in processes that import what
they need.
"""

import argparse
import importlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from .harness.repository import commit_line

TIMED = ("nestdata --help", "nestmodel --help", "nestmodel fit --help", "nestdata prepare --help")
ROUNDS = 5
_LONGEST = 150


def record(checkout: Path) -> dict[str, Any]:
    """Returns what every line did, and the times of some in several rounds."""
    sys.path.insert(0, str(checkout))
    check, folder, lines, process = (
        importlib.import_module(f"tests.cli.first_contact.{name}") for name in ("check", "folder", "lines", "process")
    )
    with tempfile.TemporaryDirectory() as name:
        work = Path(name).resolve()
        did = []
        with process.commands(checkout, work / "warm", warm=True) as server:
            folder.make_folder(work / "folder", server)
            for line in (*lines.LINES, *lines.PROGRAMS):
                found = check.attempt(line, work / "folder", server)
                outcome = found.outcome
                defects = check.defects(line, found)
                did.append(
                    {
                        "command": line.command,
                        "code": outcome.code,
                        "lines": [sum(bool(text.strip()) for text in stream.splitlines()) for stream in outcome[1:3]],
                        "says": check.decisive_line(line, outcome).replace(f"{checkout}/", ""),
                        "defects": defects,
                        "cpu_s": outcome.cpu_s,
                    }
                )
                sys.stderr.write(f"{line.command}: {'; '.join(defects) or 'right'}\n")
        with process.commands(checkout, work / "cold", warm=False) as server:
            rounds = [{command: server.run(command.split(), work).cpu_s for command in TIMED} for _ in range(ROUNDS)]
    times = {command: [seconds[command] for seconds in rounds] for command in TIMED}
    return {"lines": did, "times": times}


def table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Returns the comparison of two records as Markdown."""
    pairs = list(zip(before["lines"], after["lines"], strict=True))
    wrong = [sum(bool(line["defects"]) for line in record["lines"]) for record in (before, after)]
    changed = sum(old["command"] != new["command"] for old, new in pairs)
    text = [
        f"Of {len(pairs)} lines, {changed} are typed differently now. Bold exit codes mark those that do not do what "
        f"their own version promises: {wrong[0]} before, {wrong[1]} now.",
        "",
        "| | command | before | lines | says | now | lines | says |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, (old, new) in enumerate(pairs, start=1):
        commands = " is now ".join(dict.fromkeys(_code(line["command"]) for line in (old, new)))
        text.append(f"| {number} | {commands} | {_cells(old)} | {_cells(new)} |")
    text += ["", f"| CPU time, median of {ROUNDS} | before, s | now, s |", "|---|---|---|"]
    for command in TIMED:
        medians = [f"{statistics.median(record['times'][command]):.2f}" for record in (before, after)]
        text.append(f"| {_code(command)} | {' | '.join(medians)} |")
    return "\n".join(text)


def _cells(line: dict[str, Any]) -> str:
    """Returns the exit code, the number of lines on both streams, and the decisive line."""
    num_out, num_err = line["lines"]
    code = f"**{line['code']}**" if line["defects"] else str(line["code"])
    says = line["says"]
    return f"{code} | {num_out}+{num_err} | {_code(says if len(says) <= _LONGEST else says[:_LONGEST] + ' ...')}"


def _code(text: str) -> str:
    """Returns a cell in which nothing but the bars of the table has a meaning."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in text).replace("|", "\\|")
    fence = "``" if "`" in plain else "`"
    return f"{fence} {plain} {fence}" if "`" in plain else f"{fence}{plain}{fence}" if plain else ""


def main() -> None:
    """Records a checkout, or prints the comparison of two records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--table", nargs=2, type=Path, metavar="RECORD")
    arguments = parser.parse_args()
    if arguments.table:
        before, after = (json.loads(path.read_text()) for path in arguments.table)
        print(commit_line() + "\n\n" + table(before, after))
    elif arguments.output:
        arguments.output.write_text(json.dumps(record(arguments.checkout.resolve()), indent=1) + "\n")
    else:
        parser.error("give --output FILE or --table BEFORE AFTER")


if __name__ == "__main__":
    main()
