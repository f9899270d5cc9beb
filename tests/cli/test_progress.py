"""What long commands show: on a terminal, without one, and in words."""

import subprocess
import sys
from pathlib import Path

import pytest

from nestcli import progress as shown
from nestcli.progress import describer, progress
from tests.synthesis import hiss, write_audio


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_that_is_left_follows_from_the_share_that_is_done() -> None:
    clock = Clock()
    describe = describer(clock)
    assert describe(0, 48000, "entries") == "0 of 48,000 entries"
    clock.now += 60
    assert describe(12000, 48000, "entries") == "12,000 of 48,000 entries, ETA 0:03:00"
    assert describe(12000, None, "entries") == "12,000 entries"
    assert describe(48010, 48000, "entries") == "48,010 of 48,010 entries"  # the total was approximate


def test_plain_lines_are_repeated_while_nothing_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown, "_SECONDS_BETWEEN_LINES", 0.01)
    with progress("checking audio", repeats=True) as report:
        report(0, 7, "entries, 0.0 h")
        lines: list[str] = []
        while len(lines) < 2:
            lines += capsys.readouterr().err.splitlines()
    assert set(lines) == {"checking audio: 0 of 7 entries, 0.0 h"}


PREPARE = """
import sys
from nestcli import nestdata as command, progress
progress._SECONDS_BETWEEN_LINES = 0.01
sys.exit(command.main(["prepare", *sys.argv[1:]]))
"""


def test_prepare_shows_total_and_hours(tmp_path: Path) -> None:
    for i in range(3):
        write_audio(tmp_path / "audio" / f"{i}.wav", hiss(16000 * 60, i))
    command = [sys.executable, "-c", PREPARE, str(tmp_path / "audio"), "-o", str(tmp_path / "a.corpus")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    assert "checking audio" in shown
    assert "of 3 entries, 0." in shown
