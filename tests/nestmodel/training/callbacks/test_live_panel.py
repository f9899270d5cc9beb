import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from nestmodel.training.callbacks.live_panel import LivePanel, panel, terminal
from nestmodel.training.run_state import RunState, Scores
from tests.terminal import Terminal

STATE = RunState(
    step=31_300,
    num_steps=80_000,
    activity="training",
    seconds_left=86_399.0,
    training=Scores(5.1, 5.2, 0.123),
    validation=Scores(5.3, 5.2, 0.1),
    validated_step=30_000,
    metrics={"audio_s_per_s": 12_345.0, "data_wait": 0.03, "memory_gb": 71.2, "steps_skipped": 2.0},
)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal of 80 columns in place of standard error."""
    made = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    yield made
    made.close()


def started() -> LivePanel:
    console = terminal()
    assert console is not None
    live = LivePanel(console)
    live.start()
    return live


def text_of(state: RunState, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(panel(state, width))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_panel_has_what_is_known() -> None:
    lines = text_of(STATE, 78)
    assert lines[0].startswith("step 31,300 of 80,000 ━")
    assert lines[0].endswith(" ETA 23:59:59")
    assert lines[1:] == [
        "training   loss 5.100 (entropy 5.200)   masked accuracy 12.3 %",
        "12,345 s of audio/s   3 % waiting   71.2 GB   2 steps skipped",
        "validation at 30,000   loss 5.300 (above entropy 5.200: no better than chance)",
        "masked accuracy 10.0 %",
        "",
    ]
    assert text_of(RunState(step=7, num_steps=None, activity="starting"), 78) == ["step 7", "starting", ""]
    assert "ETA" not in text_of(replace(STATE, activity="finished"), 78)[0]


def test_a_state_replaces_the_one_before_and_warnings_stay_above_it(screen: Terminal) -> None:
    with screen.as_stderr():
        handler = logging.StreamHandler()
        logger = logging.getLogger("test_live_panel")
        logger.addHandler(handler)
        live = started()
        live.show(replace(STATE, step=1))
        logger.warning("a record of a handler that was made before")
        sys.stderr.write("UserWarning: the loss is stuck\n")  # as `warnings` does outside of pytest
        live.show(replace(STATE, step=2))
        live.stop()
        logger.warning("after")
        logger.removeHandler(handler)
        lines = screen.lines()
        assert sum(line.startswith("step ") for line in lines) == 1
        first = next(index for index, line in enumerate(lines) if line.startswith("step 2 of 80,000"))
        above = "\n".join(lines[:first])
        for message in ("UserWarning: the loss is stuck", "a record of a handler that was made before"):
            assert message in above
        assert lines[first + 3].startswith("validation at 30,000")
        assert lines[-1] == "after"


def test_a_panel_needs_a_terminal_that_moves_its_cursor(screen: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    with screen.as_stderr():
        assert terminal() is not None
        monkeypatch.setenv("TERM", "dumb")
        assert terminal() is None
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("FORCE_COLOR", "1")
        with open(os.devnull, "w") as stream:
            monkeypatch.setattr(sys, "stderr", stream)
            assert terminal() is None
