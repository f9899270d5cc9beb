"""Compares what a command line did with what it has to do."""

import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .folder import copied
from .lines import Line
from .process import Commands, Outcome

_NO_LINE = "no line is"

# A command prints such a line on stderr every few seconds: their number depends on the speed of the machine.
_PROGRESS = re.compile(r"[a-z ]+: [\d,]+ of [\d,]+ .*")


class Attempt(NamedTuple):
    """A command line that was run in a copy of the newcomer's folder."""

    outcome: Outcome
    """Its outcome, with paths that are relative to the folder."""

    written: list[str]
    """Files and directories that it created."""


def attempt(line: Line, folder: Path, commands: Commands) -> Attempt:
    """Runs a command line in a copy of the folder."""
    copy = Path(tempfile.mkdtemp(prefix="copy", dir=folder.parent)) / "folder"
    with copied(folder, copy):
        before = set(copy.rglob("*"))
        outcome = commands.run(shlex.split(line.command), copy, hidden=line.hidden, interrupt_at=line.interrupt_at)
        written = sorted(str(path.relative_to(copy)) for path in set(copy.rglob("*")) - before)
    out, err = (_relative(text, [copy, folder]) for text in (outcome.out, outcome.err))
    return Attempt(Outcome(outcome.code, out, err, outcome.cpu_s), written)


def defects(line: Line, found: Attempt) -> list[str]:
    """Returns what is wrong with an attempt, in words."""
    code, out, err, _ = found.outcome
    wrong = [f"exit code {code}, not {line.code}"] if code != line.code else []
    lines = {"out": out.splitlines(), "err": [text for text in err.splitlines() if text.strip()]}
    for wanted in line.says.split("\n"):
        if not any(_matches(wanted, text) for text in (*lines["out"], *lines["err"])):
            wrong.append(f"{_NO_LINE} {wanted!r}")
    lines["err"] = [text for text in lines["err"] if not _PROGRESS.fullmatch(text)]
    for stream, limit in (("err", line.err_lines), ("out", line.out_lines)):
        if limit is not None and len(lines[stream]) > limit:
            wrong.append(f"{len(lines[stream])} lines on std{stream}, more than {limit}")
    if "Traceback (most recent call last)" in out + err:
        wrong.append("a traceback")
    if "\x1b" in out + err:
        wrong.append("escape sequences for a terminal")
    unnamed = [name for name in found.written if name not in err]  # the list of rejects is named
    if line.code in (1, 2) and unnamed:
        wrong.append(f"left behind: {', '.join(unnamed)}")
    return wrong


def is_message(defect: str) -> bool:
    """Returns whether a defect is that of a message, and not of a code, files or the number of lines."""
    return defect.startswith(_NO_LINE)


def decisive_line(line: Line, outcome: Outcome) -> str:
    """Returns the line that says what a command line has to say, or else the last one."""
    lines = [text for text in (*outcome.out.splitlines(), *outcome.err.splitlines()) if text.strip()]
    wanted = [text for text in lines if _matches(line.says.split("\n")[0], text)]
    errors = [text for text in lines if text.startswith("error: ") or re.match(r"\w+Error: ", text)]
    return (wanted or errors[-1:] or lines[-1:] or [""])[0]


def _matches(wanted: str, text: str) -> bool:
    return re.fullmatch(".*".join(re.escape(part) for part in wanted.split("...")), text) is not None


def _relative(text: str, folders: Sequence[Path]) -> str:
    for folder in folders:
        text = text.replace(f"{folder}/", "").replace(str(folder), ".")
    return text
