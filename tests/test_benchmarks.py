import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.catalogue import catalogue
from benchmarks.harness.children import run_command, run_peer
from benchmarks.harness.kept_settings import draw_once, keep_settings
from benchmarks.harness.report import Report
from benchmarks.harness.rounds import ratios, run_rounds, spread
from benchmarks.learning.parts.curves import SCORED, time_cells

REPOSITORY = Path(__file__).parents[1]
BENCHMARKS = REPOSITORY / "benchmarks"


def python(program: str) -> list[str | Path]:
    return [sys.executable, "-c", program]


def test_the_output_of_a_peer_is_returned(tmp_path: Path) -> None:
    program = "import os, sys; print(os.getcwd(), os.environ['A']); print('a warning', file=sys.stderr)"
    assert run_peer(python(program), cwd=tmp_path, env={"A": "b"}) == f"{tmp_path.resolve()} b\n"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise ValueError('no such model')", "exit code 1: ValueError: no such model"),
        ("import sys; print('first\\nlast\\n\\n ', file=sys.stderr); sys.exit(3)", "exit code 3: last"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9: no message on standard error"),
    ],
)
@pytest.mark.parametrize("echo", [False, True])
def test_a_failed_peer_ends_the_benchmark_with_its_exit_code_and_last_line(
    program: str, message: str, echo: bool
) -> None:
    with pytest.raises(SystemExit) as caught:
        run_peer(python(program), echo=echo)
    assert str(caught.value) == f"{Path(sys.executable).name} -c: {message}"


def test_much_output_on_both_streams_does_not_block() -> None:
    program = "import sys; print('o' * 10**6); print('e' * 10**6, file=sys.stderr); print('o' * 10**6)"
    assert len(run_peer(python(program))) == 2 * 10**6 + 2


def test_the_errors_of_a_peer_are_passed_on_while_it_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_peer(python("import sys; print('out'); print('err', file=sys.stderr)"), echo=True) == ""
    assert capfd.readouterr() == ("out\n", "err\n")


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"gone -c: cannot be started \(No such file or directory: .*gone\)"):
        run_peer([tmp_path / "gone", "-c"])


def test_a_command_of_the_project_finds_this_repository_and_has_one_thread(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "import benchmarks, os; print(os.getcwd(), os.environ['OMP_NUM_THREADS'], os.environ['LAYER'])"
    run_command(f'python -c "{program}"', tmp_path, echo=True, LAYER="2")
    assert capfd.readouterr().out == f'$ python -c "{program}"\n{tmp_path.resolve()} 1 2\n'


def test_a_benchmark_goes_on_with_the_settings_of_its_first_call_only(tmp_path: Path) -> None:
    keep_settings(tmp_path, {"steps": 4, "quick": True})
    keep_settings(tmp_path, {"steps": 4, "quick": True})
    with pytest.raises(SystemExit, match=r"settings\.json: steps was 4 and is 5\. Give the same settings, or another"):
        keep_settings(tmp_path, {"steps": 5, "quick": True})


def test_a_drawn_order_is_kept_for_a_run_that_goes_on(tmp_path: Path) -> None:
    items = [["pretrained", seed] for seed in range(20)]
    drawn = draw_once(tmp_path / "order.json", items)
    assert sorted(drawn) == items
    assert draw_once(tmp_path / "order.json", items) == drawn


@pytest.mark.parametrize(("since", "ours", "ratio"), [("start", "30", "> 3.30"), ("step", "20", "> 4.45")])
def test_the_bound_on_a_time_that_nemo_does_not_reach_counts_as_ours_does(since: str, ours: str, ratio: str) -> None:
    def curve(seconds: list[float], losses: list[float]) -> dict[str, Any]:
        """Returns a run whose process started at 100 s, and whose first weights took a second to save."""
        return {
            "started": 100.0,
            "points": [
                {
                    "time": 100.0 + second,
                    "saving_s": saving_s,
                    "step": second,
                    "token_entropy": 5.0,
                    "losses": {SCORED: loss},
                }
                for second, saving_s, loss in zip(seconds, [0.0, 1.0], losses, strict=True)
            ],
        }

    cells = time_cells(curve([10, 31], [6.0, 4.9]), curve([10, 100], [6.0, 5.0]), 0, 0.1, since)
    assert cells[3:6] == [ours, "not reached", ratio]


def test_benchmarks_are_listed_with_their_claims(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "benchmarks/batches/\n  feeding" in listed
    assert all(f"  {name} " in listed and one.claim in listed for name, one in catalogue().items())


def test_a_benchmark_that_does_not_exist_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "paln"])
    assert "paln: no such benchmark; there are feeding, plan" in capsys.readouterr().err


@pytest.mark.slow
def test_a_benchmark_is_tried_on_little_and_prints_its_result(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "run", "plan", "--cuts", "3000", "--lhotse-cuts", "2900"]
    printed = run_peer([*command, "--results", tmp_path / "result.md"], cwd=REPOSITORY)
    assert printed.endswith((tmp_path / "result.md").read_text())


def test_a_result_has_its_conditions_wrapped_paragraphs_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "result.md"
    script = BENCHMARKS / "batches" / "plan.py"
    report = Report("Speed", str(script), "3 rounds, 2 cores.", results=result)
    report.section("Ratios")
    report.text(f"""{"A-word " * 20}
        and more.""")
    report.table(["what", "s"], [["ours", 1.5]])
    text = result.read_text()
    assert capsys.readouterr().out == text
    assert text.startswith("# Speed\n\nMade by `benchmarks/batches/plan.py`: 3 rounds, 2 cores.\n\nMeasured at commit ")
    assert text.endswith("A-word and more.\n\n| what | s |\n|---|---|\n| ours | 1.5 |\n\n")
    assert max(len(line) for line in text.splitlines() if "A-word" in line) <= 120


def test_quick_sets_values_that_later_options_override() -> None:
    parser = benchmark_parser("Measures.", rounds=5, quick={"rounds": 1, "steps": 20})
    parser.add_argument("--steps", type=int, default=100)
    assert parser.parse_args([]) == argparse.Namespace(quick=False, rounds=5, steps=100, results=None)
    given = parser.parse_args(["--quick", "--steps", "3"])
    assert given == argparse.Namespace(quick=True, rounds=1, steps=3, results=None)


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
