"""How long work shows that it is alive: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yields a function that takes (done, total) and reports on stderr."""
    if not sys.stderr.isatty():
        yield _plain_lines(what)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _plain_lines(what: str) -> Callable[[int, int | None], None]:
    last = time.monotonic()

    def report(done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{what}: {done}" + ("" if total is None else f" of {total}"), file=sys.stderr)

    return report
