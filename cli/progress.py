"""Progress of long commands on stderr: a bar on a terminal, otherwise a plain line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yields a function that reports (done, total); the total is None while it is unknown."""
    if not sys.stderr.isatty():
        yield _plain_lines(label)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _plain_lines(label: str) -> Callable[[int, int | None], None]:
    last = time.monotonic()

    def report(done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{label}: {done}" + ("" if total is None else f" of {total}"), file=sys.stderr)

    return report
