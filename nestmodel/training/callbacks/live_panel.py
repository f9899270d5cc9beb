"""A panel on a terminal that shows where a run stands, below everything else that the process prints.

It is redrawn by the training thread only: a thread of rich would hold its locks while loader workers are forked.
"""

import logging
import sys
from typing import IO, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nestmodel.training.callbacks.progress import PlainLines, Renderer, score_facts, step_of, time_left, training_facts
from nestmodel.training.run_state import RunState

_MAX_WIDTH = 78
"""Columns of the panel. All wider terminals show it in the same way, so that it survives a resize."""


def terminal() -> Console | None:
    """Returns the terminal on stderr; None if stderr is not a terminal or cannot move its cursor."""
    console = Console(stderr=True, highlight=False)
    is_live = sys.stderr.isatty() and console.is_terminal and not console.is_dumb_terminal
    return console if is_live else None


def renderer() -> Renderer:
    """Returns how progress is shown: by a panel on a terminal, and by lines elsewhere."""
    console = terminal()
    return LivePanel(console) if console else PlainLines()


class LivePanel:
    """Shows each state in place of the one before.

    What this process prints in the meantime, warnings and logs included, appears above the panel. What another process
    prints starts in a line of its own, below it.

    Args:
        console: The terminal.
    """

    seconds_between = 0.5

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._moved: list[logging.StreamHandler[Any]] = []

    def start(self) -> None:
        """Redirects stderr, and stdout if it is a terminal, to the lines above the panel."""
        stderr = sys.stderr
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
        self._live.start()
        self._console.show_cursor(True)  # it would stay hidden if this process were killed
        self._moved = _move_handlers(stderr, sys.stderr)

    def show(self, state: RunState) -> None:
        """Draws a state."""
        if self._live is not None:
            self._live.update(panel(state, min(self._console.width, _MAX_WIDTH)), refresh=True)

    def stop(self) -> None:
        """Ends the redirection; the last state stays visible."""
        if self._live is not None:
            self._live.stop()
            for handler in self._moved:
                handler.setStream(sys.stderr)
        self._live, self._moved = None, []


def panel(state: RunState, width: int) -> Group:
    """Returns a state as lines of at most `width` columns.

    The last line is empty: the cursor waits there for what other processes print.
    """
    facts = _packed([state.activity, *training_facts(state)], width)
    if state.validation is not None:
        facts += _packed([f"validation at {state.validated_step:,}", *score_facts(state.validation)], width)
    return Group(_step_line(state, width), *map(Text, facts), Text(""))


def _step_line(state: RunState, width: int) -> Table:
    """Returns the step, a bar, and the time that is left."""
    bar = Text("") if state.num_steps is None else ProgressBar(total=max(1, state.num_steps), completed=state.step)
    line = Table.grid(padding=(0, 1))
    line.width = width
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_row(Text(step_of(state), style="bold"), bar, Text("".join(time_left(state))))
    return line


def _packed(facts: list[str], width: int) -> list[str]:
    """Joins facts to lines of at most `width` columns."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + 3 + len(fact) <= width:
            lines[-1] += f"   {fact}"
        else:
            lines.append(fact)
    return lines


def _move_handlers(before: IO[str], after: IO[str]) -> list[logging.StreamHandler[Any]]:
    """Makes the log handlers that write to one stream write to another; returns them."""
    loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    moved = [handler for handler in handlers if isinstance(handler, logging.StreamHandler) and handler.stream is before]
    for handler in moved:
        handler.setStream(after)
    return moved
