import json
from pathlib import Path

import pytest

from nestcli.nestdata import main
from nestdata import BatchPlan, Corpora, PlanConfig, summarise_plan
from tests.conftest import MessyCorpora

MICROBATCHES = ("--microbatches-per-step", "2")


def test_the_plan_is_printed_as_a_table(
    messy_corpora: MessyCorpora, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert (
        main(["plan", str(messy_corpora.speech), "--world-size", "2", "--max-batch-seconds", "12", *MICROBATCHES]) == 0
    )
    shown = capsys.readouterr().out
    corpora = Corpora.open([messy_corpora.speech])
    plan = BatchPlan.of(corpora, PlanConfig(max_batch_seconds=12.0, microbatches_per_step=2))
    assert f"{plan.steps_per_epoch} steps per epoch" in shown
    assert sum(line.count("│") == 7 for line in shown.splitlines()) == len(plan.buckets)


def test_json_is_the_summary_of_the_requested_plan(
    messy_corpora: MessyCorpora, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(messy_corpora.speech), str(messy_corpora.windows)]
    options = [
        "--world-size",
        "2",
        "--microbatches-per-step",
        "4",
        "--max-batch-seconds",
        "20",
        "--data.plan.min-audio-seconds",
        "0.5",
        "--data.plan.bucket-width",
        "0.02",
    ]
    options += [
        "--data.plan.quadratic-seconds",
        "30",
        "--data.plan.max-cuts",
        "6",
        "--num-shapes",
        "3",
        "--weights",
        "0.6",
        "0.4",
    ]
    options += ["--temperature", "2", "--seed", "5", "--picture", str(tmp_path / "plan.svg"), "--json"]
    assert main(["plan", *paths, *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    config = PlanConfig(
        max_batch_seconds=20.0,
        microbatches_per_step=4,
        min_audio_seconds=0.5,
        quadratic_seconds=30.0,
        max_cuts=6,
        bucket_width=0.02,
        num_shapes=3,
        weights=(0.6, 0.4),
        temperature=2.0,
        seed=5,
    )
    corpora = Corpora.open(paths)
    summary = summarise_plan(BatchPlan.of(corpora, config), corpora.num_samples)
    assert shown["fingerprint"] == summary.fingerprint
    assert shown["padding"] == summary.padding
    assert len(shown["buckets"]) == len(summary.buckets)
    assert "<svg" in (tmp_path / "plan.svg").read_text()


def test_the_stages_of_a_file_are_printed_with_shares_and_repeats(
    messy_corpora: MessyCorpora, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    page = (Path(__file__).parents[2] / "docs" / "how-a-batch-is-chosen.md").read_text(encoding="utf-8")
    example = next(block for block in page.split("```")[1::2] if block.startswith("yaml\n# stages.yaml"))
    (tmp_path / "run.yaml").write_text(example.removeprefix("yaml\n"))
    paths = [str(messy_corpora.speech), str(messy_corpora.windows), str(messy_corpora.banked)]
    assert main(["plan", *paths, "--config", str(tmp_path / "run.yaml"), *MICROBATCHES]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert main(["plan", *paths, "--config", str(tmp_path / "run.yaml"), *MICROBATCHES, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert [stage["from_step"] for stage in summary["stages"]] == [0, 20000, 40000]
    # No step has the mixture of the plan itself.
    assert sum("% of the hours" in line for line in shown) == 9
    for stage in summary["stages"]:
        first = shown.index(f"from step {stage['from_step']:,} on") + 1
        for line, path, corpus, seen in zip(
            shown[first : first + 3], paths, stage["corpora"], stage["seen_before"], strict=True
        ):
            assert line.startswith(f"  {path}: {100 * corpus['share']:.1f} % of the hours, each cut ")
            assert line.endswith(f"{summary['hours']:,.2f} h, {seen:.2f} times before")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            "[{from_step: x}]",
            "data.plan.stages.from_step is 'x': expected int",
        ),
        (
            "{from_step: 1}",
            "data.plan.stages is {'from_step': 1}: expected",
        ),
        ("[{from_step: 3}, {from_step: 3}]", "plan.stages[1].from_step is 3: expected more than 3"),
        ("[{from_step: 3, weights: [1, .nan]}]", "plan.stages[0].weights is (1.0, nan): expected a positive number"),
        ("[{from_step: 3, weights: [1, 2]}]", "plan.stages[0].weights has 2 numbers for 1 corpora"),
    ],
)
def test_a_mistake_in_the_stages_of_a_file_is_one_line(
    messy_corpora: MessyCorpora, tmp_path: Path, stages: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(f"data: {{plan: {{stages: {stages}}}}}")
    assert main(["plan", str(messy_corpora.speech), "--config", str(tmp_path / "run.yaml"), *MICROBATCHES]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--weights", "a"], 2, "--weights"),
        (["--weights", "1", "2"], 2, "plan.weights has 2 numbers for 1 corpora"),
        (["--world-size", "3"], 2, "3 ranks cannot share evenly"),
        (["--num-shapes", "0"], 2, "plan.num_shapes is 0"),
        (["--picture", "plan.xyz"], 2, "--picture is 'plan.xyz': expected a name that ends in .png, .svg or .pdf."),
        (
            ["--picture", "/gone/plan.png", *MICROBATCHES],
            1,
            "/gone/plan.png: No such file or directory. Check the path",
        ),
    ],
)
def test_an_invalid_setting_is_one_line(
    messy_corpora: MessyCorpora, options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(messy_corpora.speech), *options]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
