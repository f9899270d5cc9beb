"""Modules that commands use to plan and prepare must not import the large libraries of training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.synthesis import folder_corpus, hiss

REFUSE_LARGE_LIBRARIES = """
import sys
for name in ("torch", "torchaudio", "lhotse", "soundfile", "audiomentations", "matplotlib", "nestguard"):
    sys.modules[name] = None  # an import raises ImportError
"""


def run_without_large_libraries(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", REFUSE_LARGE_LIBRARIES + program, *arguments]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    return run.stdout


@pytest.mark.parametrize(
    "module",
    [
        "nestdata.config_checks",
        "nestdata.audio.decode",
        "nestdata.corpus.bank",
        "nestdata.corpus.corpora",
        "nestdata.corpus.corpus",
        "nestdata.errors",
        "nestdata.output",
        "nestdata.pack.run",
        "nestdata.pack.verify",
        "nestdata.plan.batch_plan",
        "nestdata.plan.layout",
        "nestdata.plan.lengths",
        "nestdata.plan.summary",
        "nestdata.stateless_rng",
    ],
)
def test_module_imports_without_large_libraries_and_without_the_stall_guard(module: str) -> None:
    run_without_large_libraries(f"import {module}")


def test_plan_of_a_corpus_is_summarised_without_large_libraries(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.wav": hiss(16000 + i, i) for i in range(8)})
    program = """
from nestdata import BatchPlan, Corpora, PlanConfig, summarise_plan
corpora = Corpora.open(sys.argv[1:])
plan = BatchPlan.of(corpora, PlanConfig(microbatches_per_step=2))
print(summarise_plan(plan, corpora.num_samples).num_positions, sorted(plan.indices(0, 0).tolist()))
"""
    counted = run_without_large_libraries(program, str(corpus.path))
    assert counted.startswith("8 [")


def test_plan_command_runs_without_large_libraries(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.wav": hiss(16000 + i, i) for i in range(8)})
    program = """
import sys
from nestcli.nestdata import main
code = main(["plan", *sys.argv[1:]])
sys.exit(code or " ".join({"torch", "lhotse", "soundfile", "audiomentations", "matplotlib"} & {*sys.modules}) or 0)
"""
    command = [sys.executable, "-c", program, str(corpus.path), "--world-size", "2", "--json"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout
    assert json.loads(printed)["num_positions"] == 8
