import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.harness.catalogue import catalogue
from benchmarks.harness.children import run_peer
from benchmarks.harness.kept_settings import keep_settings
from benchmarks.harness.rounds import ratios, run_rounds, spread

REPOSITORY = Path(__file__).parents[1]
BENCHMARKS = REPOSITORY / "benchmarks"


def python(program: str) -> list[str | Path]:
    return [sys.executable, "-c", program]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise ValueError('no such model')", "exit code 1: ValueError: no such model"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9: no message on standard error"),
    ],
)
def test_a_failed_peer_ends_the_benchmark_with_its_exit_code_and_last_line(program: str, message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run_peer(python(program))
    assert str(caught.value) == f"{Path(sys.executable).name} -c: {message}"


def test_a_benchmark_goes_on_with_the_settings_of_its_first_call_only(tmp_path: Path) -> None:
    keep_settings(tmp_path, {"steps": 4, "quick": True})
    keep_settings(tmp_path, {"steps": 4, "quick": True})
    with pytest.raises(SystemExit, match=r"settings\.json: steps was 4 and is 5\. Give the same settings, or another"):
        keep_settings(tmp_path, {"steps": 5, "quick": True})


def test_benchmarks_are_listed_with_their_claims(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "benchmarks/batches/\n  feeding" in listed
    assert all(f"  {name} " in listed and one.claim in listed for name, one in catalogue().items())


@pytest.mark.slow
def test_a_benchmark_is_tried_on_little_and_prints_its_result(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "run", "plan", "--cuts", "3000", "--lhotse-cuts", "2900"]
    printed = run_peer([*command, "--results", tmp_path / "result.md"], cwd=REPOSITORY)
    assert printed.endswith((tmp_path / "result.md").read_text())


def test_contestants_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    rounds = run_rounds({name: partial(measure, name) for name in ("a", "b")}, 2)
    assert calls == ["a", "b"] * 3
    assert rounds == [{"a": 3.0, "b": 4.0}, {"a": 5.0, "b": 6.0}]
    assert ratios(rounds, "b", "a") == [4 / 3, 6 / 5]
    assert spread([1.0, 4.0, 2.0], 1) == "2.0 (1.0 to 4.0)"
