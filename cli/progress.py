"""Progress of long commands on stderr: a bar on a terminal, otherwise a plain line every few seconds."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

_SECONDS_BETWEEN_LINES = 5.0
# Before this many seconds of work, the remaining time would be a guess.
_SECONDS_BEFORE_ETA = 2.0


class Report(Protocol):
    """Reports how far a command has come."""

    def __call__(self, done: int, total: int | None, note: str = "") -> None:
        """Reports items done, their total or None, and a note that is shown after the numbers."""


@contextmanager
def progress(label: str, *, repeats: bool = False) -> Iterator[Report]:
    """Yields a function that reports (done, total, note); the total is None while it is unknown.

    Args:
        label: What the command is doing.
        repeats: Whether plain lines are printed while nothing is reported, too. They come from a thread, so that the
            command must not fork.
    """
    if not sys.stderr.isatty():
        with _plain_lines(label, repeats=repeats) as report:
            yield report
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    # The text is ours, and its names must not be parsed as markup.
    text = TextColumn("{task.fields[text]}", markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), text)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, describe = bar.add_task(label, total=None, text=""), describer()

        def show(done: int, total: int | None, note: str = "") -> None:
            bar.update(task, completed=done, total=total and max(done, total), text=describe(done, total, note))

        yield show


def describer(clock: Callable[[], float] = time.monotonic) -> Callable[[int, int | None, str], str]:
    """Returns a function that puts progress in words, with the time that is left; the work begins now."""
    start = clock()

    def describe(done: int, total: int | None, note: str) -> str:
        # Totals may be approximate: an estimate that is too low must not be shown as more than everything.
        count = f"{done:,}" if total is None else f"{done:,} of {max(done, total):,}"
        elapsed = clock() - start
        if total is None or done <= 0 or done >= total or elapsed < _SECONDS_BEFORE_ETA:
            return f"{count} {note}".rstrip()
        left = timedelta(seconds=round(elapsed * (total - done) / done))
        return f"{count} {note}".rstrip() + f", ETA {left}"

    return describe


@contextmanager
def _plain_lines(label: str, *, repeats: bool) -> Iterator[Report]:
    last, text, describe, is_over = time.monotonic(), "", describer(), threading.Event()

    def print_line() -> None:
        print(f"{label}: {text}", file=sys.stderr, flush=True)

    def report(done: int, total: int | None, note: str = "") -> None:
        nonlocal last, text
        text = describe(done, total, note)
        if not repeats and time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print_line()

    def repeat() -> None:
        while not is_over.wait(_SECONDS_BETWEEN_LINES):
            if text:
                print_line()

    thread = threading.Thread(target=repeat, daemon=True) if repeats else None
    if thread:
        thread.start()
    try:
        yield report
    finally:
        is_over.set()
        if thread:
            thread.join()
