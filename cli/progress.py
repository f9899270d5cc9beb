"""Progress of long commands on stderr: a bar on a terminal, otherwise a plain line every few seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_SECONDS_BETWEEN_LINES = 5.0


class Report(Protocol):
    """Reports how far a command has come."""

    def __call__(self, done: int, total: int | None, note: str = "") -> None:
        """Reports items done, their total or None, and a note that is shown after the numbers."""


@contextmanager
def progress(label: str) -> Iterator[Report]:
    """Yields a function that reports (done, total, note); the total is None while it is unknown."""
    if not sys.stderr.isatty():
        yield _plain_lines(label)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    note = TextColumn("{task.fields[note]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)


def _plain_lines(label: str) -> Report:
    last = time.monotonic()

    def report(done: int, total: int | None, note: str = "") -> None:
        nonlocal last
        if time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            count = f"{done}" if total is None else f"{done} of {total}"
            print(f"{label}: {count} {note}".rstrip(), file=sys.stderr)

    return report
