"""Runs the 84 command lines and five programs of a newcomer in a checkout, and compares two checkouts.

    python -m benchmarks.first_contact --checkout ../old -o old.json
    python -m benchmarks.first_contact -o new.json
    python -m benchmarks.first_contact --table old.json new.json

The lines, and what each has to say, are those of `tests/cli/test_first_contact.py`. Each runs in a process of its own,
which is forked after the large dependencies were imported, and in a new copy of the newcomer's folder, whose corpora
and checkpoint were made by the same checkout. The help is timed in processes that import what they need.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.cli.first_contact.check import Attempt, attempt, decisive_line, defects, is_message
from tests.cli.first_contact.folder import make_folder
from tests.cli.first_contact.lines import LINES, PROGRAMS, Line
from tests.cli.first_contact.process import Outcome, commands

from .harness.repository import commit_line

TIMED = ("nestdata --help", "nestmodel --help", "nestmodel fit --help", "nestdata prepare --help")
ROUNDS = 5
_LONGEST = 150


def record(checkout: Path) -> dict[str, Any]:
    """Returns what every line did, and the times of some in several rounds."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name).resolve()
        lines: dict[str, Any] = {}
        with commands(checkout, work / "warm", warm=True) as server:
            make_folder(work / "folder", server)
            for line in (*LINES, *PROGRAMS):
                found = attempt(line, work / "folder", server)
                code, out, err, cpu_s = found.outcome
                out, err = (text.replace(f"{checkout}/", "") for text in (out, err))
                lines[line.command] = [(code, out, err, cpu_s), found.written]
                sys.stderr.write(f"{line.command}: {'; '.join(defects(line, found)) or 'right'}\n")
        with commands(checkout, work / "cold", warm=False) as server:
            rounds = [{command: server.run(command.split(), work).cpu_s for command in TIMED} for _ in range(ROUNDS)]
    times = {command: [seconds[command] for seconds in rounds] for command in TIMED}
    return {"lines": lines, "times": times}


def table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Returns the comparison of two records as Markdown."""
    lines = (*LINES, *PROGRAMS)
    found = [{line: _attempt_of(record, line) for line in lines} for record in (before, after)]
    wrong = [[defects(line, attempts[line]) for line in lines] for attempts in found]
    other = [sum(any(not is_message(text) for text in texts) for texts in each) for each in wrong]
    num_wrong = [sum(map(bool, each)) for each in wrong]
    text = [
        f"Of {len(lines)}, {num_wrong[0]} were wrong before and {num_wrong[1]} are now; their exit codes are bold.",
        f"{other[0]} and {other[1]} of these have a wrong code, too many lines, a traceback, or leave files behind.",
        "The others differ in the message alone; the messages that are looked for are those of the present version.",
        "",
        "| | command | before | lines | says | now | lines | says |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, line in enumerate(lines, start=1):
        cells = [_cells(line, attempts[line]) for attempts in found]
        text.append(f"| {number} | {_code(line.command)} | {' | '.join(cells)} |")
    text += ["", f"| CPU time, median of {ROUNDS} | before, s | now, s |", "|---|---|---|"]
    for command in TIMED:
        medians = [f"{statistics.median(record['times'][command]):.2f}" for record in (before, after)]
        text.append(f"| {_code(command)} | {' | '.join(medians)} |")
    return "\n".join(text)


def _attempt_of(record: dict[str, Any], line: Line) -> Attempt:
    outcome, written = record["lines"][line.command]
    return Attempt(Outcome(*outcome), written)


def _cells(line: Line, found: Attempt) -> str:
    """Returns the exit code, the number of lines on both streams, and the decisive line."""
    outcome = found.outcome
    num_out, num_err = (
        sum(bool(text.strip()) for text in stream.splitlines()) for stream in (outcome.out, outcome.err)
    )
    code = f"**{outcome.code}**" if defects(line, found) else str(outcome.code)
    says = decisive_line(line, outcome)
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
