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
    options = "--world-size 2 --microbatches-per-step 4 --max-batch-seconds 20 --num-shapes 3 --weights 0.6 0.4"
    options += " --data.plan.max-cuts 6 --temperature 2 --seed 5 --json --picture"
    assert main(["plan", *paths, *options.split(), str(tmp_path / "plan.svg")]) == 0
    shown = json.loads(capsys.readouterr().out)
    config = PlanConfig(
        max_batch_seconds=20.0,
        microbatches_per_step=4,
        max_cuts=6,
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
