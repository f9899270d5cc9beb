import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestdata import AudioNoiseBatch, BatchPlan, PlanConfig, PrepareConfig
from nestmodel import (
    Checkpoints,
    CheckReport,
    CheckResult,
    ConfigError,
    NestDataModule,
    NestModel,
    PreflightConfig,
    PreflightReport,
    run_preflight,
)
from nestmodel.preflight.checks import SHARED_MEMORY, check_restarts, compare_facts, last_line
from nestmodel.preflight.hardware import largest_shapes
from nestmodel.preflight.report import CHECKS
from tests.conftest import MessyCorpora
from tests.ports import free_port
from tests.synthesis import folder_corpus, hiss
from tests.training import tiny_config, trainer

REPOSITORY = Path(__file__).parents[2]
Usage = namedtuple("Usage", "total used free")


def found(report: PreflightReport, rank: int = 0) -> dict[str, CheckResult]:
    return {check.name: check.ranks[rank] for check in report.checks}


def whole_data(corpora: MessyCorpora, *, num_workers: int = 0, seconds: float = 10.0) -> NestDataModule:
    """All of whose audio can be read."""
    plan = PlanConfig(max_batch_seconds=seconds, microbatches_per_step=2)
    return NestDataModule(corpora.speech, corpora.banked, plan=plan, num_workers=num_workers)


def result(status: Any = "ok", value: str = "", **figures: float) -> CheckResult:
    return CheckResult(status=status, value=value, advice="do it" if status == "failed" else "", figures=figures)


def test_a_rank_that_is_well_passes_every_check(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    data, seen = whole_data(messy_corpora, num_workers=1), []
    report = run_preflight(NestModel(tiny_config()), data, trainer(tmp_path), PreflightConfig(), seen.append)
    assert seen == [report]
    assert [check.name for check in report.checks] == list(CHECKS)
    status = {check.name: check.status for check in report.checks}
    assert status == {**dict.fromkeys(CHECKS, "ok"), "restarts": "skipped", "collectives": "skipped"}
    assert report.problems() == []
    assert not report.has_failed
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True
    reading, step = found(report)["reading"], found(report)["training step"]
    assert reading.value.startswith("3 read")
    assert step.figures["peak_bytes"] > 0.1e9
    assert found(report)["disk"].figures["checkpoint_bytes"] == 12 * sum(
        parameter.numel() for parameter in NestModel(tiny_config()).parameters()
    )


def test_nothing_is_left_behind(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    model, runner, random = NestModel(tiny_config()).eval(), trainer(tmp_path), torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run_preflight(model, whole_data(messy_corpora), runner)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training
    assert model._trainer is None
    assert runner.global_step == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert list(tmp_path.iterdir()) == []
    runner.fit_loop.epoch_loop.max_steps = 1  # on a single device, the same trainer goes on to train
    runner.fit(model, datamodule=whole_data(messy_corpora))
    assert runner.global_step == 1


def test_a_full_disk_and_full_shared_memory_are_told_with_sizes(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1000))
    report = run_preflight(
        NestModel(tiny_config()),
        whole_data(messy_corpora, num_workers=1),
        trainer(tmp_path, [Checkpoints(keep=3)], enable_checkpointing=True),
    )
    assert report.has_failed
    disk, shared = found(report)["disk"], found(report)["shared memory"]
    assert disk.value.startswith("0.0 MB free, 4 checkpoints of 0.")
    assert str(tmp_path) in disk.advice
    assert shared.figures["needed_bytes"] == 3 * shared.figures["batch_bytes"]
    assert "--shm-size" in shared.advice
    assert [check.status for check in report.checks if check.name not in ("restarts", "disk", "shared memory")][:3] == [
        "ok"
    ] * 3


def test_restarts_under_the_addresses_of_the_attempt_before_are_warned_of() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    told = check_restarts(torchrun)
    assert told.status == "warning"
    assert told.advice is not None
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in told.advice
    assert check_restarts({**torchrun, "TORCHELASTIC_USE_AGENT_STORE": "False"}).status == "ok"
    assert check_restarts({**torchrun, "TORCHELASTIC_MAX_RESTARTS": "0"}).status == "ok"
    assert check_restarts({}).status == "skipped"


def test_checkpoints_that_are_kept_for_good_are_counted(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = 12 * sum(parameter.numel() for parameter in NestModel(tiny_config()).parameters())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 10**12 if path == SHARED_MEMORY else 10 * each))
    callback = Checkpoints(keep=2, keep_every_n_steps=10)
    runner = trainer(tmp_path / "new" / "run", [callback], enable_checkpointing=True, max_steps=100)
    disk = found(run_preflight(NestModel(tiny_config()), whole_data(messy_corpora), runner))["disk"]
    assert disk.status == "warning"
    assert "keep_every_n_steps" in disk.advice


def test_a_corpus_that_cannot_be_read_fails_and_the_other_checks_go_on(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.wav": hiss(16000, i) for i in range(4)})
    for path in (tmp_path / "speech").glob("*.wav"):
        path.write_bytes(b"no audio")
    data = NestDataModule(corpus.path, plan=PlanConfig(max_batch_seconds=4.0, microbatches_per_step=1), num_workers=0)
    report = run_preflight(NestModel(tiny_config()), data, trainer(tmp_path))
    assert report.has_failed
    reading = found(report)["reading"]
    assert reading.status == "failed"
    assert ".wav" in reading.advice
    assert found(report)["training step"].status == "ok"
    assert any(line.startswith("failed: reading, rank 0: step 0") for line in report.problems())


def test_an_error_of_a_loader_process_is_told_in_its_last_line() -> None:
    told = "Caught AudioError in DataLoader worker process 0.\nTraceback ...\nnestdata.errors.AudioError: cut 'a: b'"
    assert last_line(ValueError(told)) == "cut 'a: b'"
    assert last_line(ValueError("step 0: bad")) == "step 0: bad"
    assert last_line(MemoryError()) == "MemoryError"


def test_a_cut_that_cannot_be_used_is_named_with_its_reason(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.wav": hiss(16000, i) for i in range(8)})
    (tmp_path / "speech" / "3.wav").unlink()
    data = NestDataModule(corpus.path, plan=PlanConfig(max_batch_seconds=4.0, microbatches_per_step=1), num_workers=0)
    config = PreflightConfig(num_batches=data.train_dataset.plan.steps_per_epoch)
    report = run_preflight(NestModel(tiny_config()), data, trainer(tmp_path), config)
    reading = found(report)["reading"]
    assert reading.status == "warning"
    assert "3 (missing)" in reading.advice
    assert not report.has_failed


@pytest.mark.parametrize(
    ("fitting_s", "words"), [(6.5, r"to about [45]\.\d+; or set"), (0.5, r"Not even one cut of 3\.1 s fits")]
)
def test_a_step_that_runs_out_of_memory_fails_and_says_what_would_fit(
    fitting_s: float, words: str, messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = NestModel.training_step

    def limited(self: NestModel, batch: AudioNoiseBatch, batch_idx: int) -> torch.Tensor:
        if batch.audio.numel() > fitting_s * 16000:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(NestModel, "training_step", limited)
    report = run_preflight(NestModel(tiny_config()), whole_data(messy_corpora, seconds=20.0), trainer(tmp_path))
    memory = found(report)["training step"]
    assert memory.status == "failed"
    assert "data.plan.max_batch_seconds (now 20)" in memory.advice
    assert re.search(words, memory.advice), memory.advice


def test_any_other_error_fails_its_check_alone(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(NestModel, "training_step", broken)
    report = run_preflight(NestModel(tiny_config()), whole_data(messy_corpora), trainer(tmp_path))
    assert report.problems() == ["failed: training step, rank 0: no such kernel"]


def test_a_corpus_at_another_rate_than_the_model_is_named(tmp_path: Path) -> None:
    audio = {f"{i}.wav": hiss(16000, i) for i in range(3)}
    corpus = folder_corpus(tmp_path / "speech", audio, PrepareConfig(sampling_rate=8000))
    data = NestDataModule(corpus.path, plan=PlanConfig(max_batch_seconds=4.0, microbatches_per_step=1), num_workers=0)
    report = run_preflight(NestModel(tiny_config()), data, trainer(tmp_path))
    (told,) = report.problems()
    assert told.startswith("failed: training step, rank 0: the corpus is at 8000 Hz, the model for 16000 Hz")


def test_the_largest_shapes_are_the_one_of_most_samples_and_the_longest() -> None:
    lengths = np.sort(np.concatenate([np.full(64, 16000), np.full(8, 99_000)]))
    plan = BatchPlan(lengths, 16000, PlanConfig(max_batch_seconds=10.0, microbatches_per_step=1))
    assert largest_shapes(plan) == [(10, 16000), (1, 99_000)]


def test_a_rank_that_differs_from_most_is_named_and_in_doubt_from_rank_0() -> None:
    one, other = {"data.plan.seed": "0", "version of torch": "2"}, {"data.plan.seed": "1", "version of torch": "2"}
    assert [r.status for r in compare_facts([other, one, one])] == ["failed", "ok", "ok"]
    assert [r.status for r in compare_facts([one, other])] == ["ok", "failed"]
    (_, told) = compare_facts([one, {"version of torch": "2"}])
    assert told.advice.startswith("data.plan.seed: (not there) here, 0 elsewhere")
    many = compare_facts([{f"s{i}": "0" for i in range(9)}, {f"s{i}": "1" for i in range(9)}])
    assert "and 4 more" in many[1].advice
    assert [r.status for r in compare_facts([{"error": "no lhotse"}] * 2)] == ["failed"] * 2


def test_a_check_is_as_bad_as_its_worst_rank_which_is_shown() -> None:
    check = CheckReport(name="reading", ranks=(result(value="fast", s=1.0), result(value="slow", s=3.0)))
    assert (check.status, check.summary) == ("ok", "slow (rank 1)")
    check = CheckReport(name="disk", ranks=(result("skipped", "not mine", s=9.0), result("failed", "full")))
    assert (check.status, check.summary) == ("failed", "full (rank 1)")
    assert CheckReport(name="disk", ranks=(result(value="same"),) * 2).summary == "same"
    report = PreflightReport(world_size=2, device="cpu", checks=(check,))
    assert report.problems() == ["failed: disk, rank 1: do it"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_batches is 0"):
        PreflightConfig(num_batches=0)
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        PreflightConfig(timeout_s=0.0)
    with pytest.raises(ConfigError, match="no check 'weather'"):
        CheckReport(name="weather", ranks=(result(),))
    with pytest.raises(ConfigError, match="no results"):
        CheckReport(name="disk", ranks=())
    with pytest.raises(ConfigError, match="world_size is 3"):
        PreflightReport(world_size=3, device="cpu", checks=(CheckReport(name="disk", ranks=(result(),)),))


_RANK_THAT_HANGS = """
import json, os, sys, time
from pathlib import Path
import nestmodel.preflight.run
from nestdata import AudioNoiseDataset
from nestmodel import NestModel, PreflightConfig, run_preflight
from nestmodel.preflight.store import Meeting
from tests.conftest import MessyCorpora
from tests.training import messy_data, tiny_config, trainer

rank, directory = int(os.environ["RANK"]), Path(sys.argv[3])
if rank == 1:
    AudioNoiseDataset.__getitem__ = lambda *_: time.sleep(6) or [].pop()
nestmodel.preflight.run.Meeting = lambda rank, world_size, _: Meeting(rank, world_size, 4.0)
data = messy_data(MessyCorpora(Path(sys.argv[1]), Path(sys.argv[2]), Path(), Path()))
runner = trainer(directory, devices=2, strategy="ddp")
report = run_preflight(NestModel(tiny_config()), data, runner, PreflightConfig(timeout_s=60.0))
(directory / f"{rank}.json").write_text(json.dumps(report.problems()))
"""


@pytest.mark.faults
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_rank_that_does_not_come_back_is_named_and_held_up_nobody(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port())
    command = [sys.executable, "-c", _RANK_THAT_HANGS, str(messy_corpora.speech), str(messy_corpora.banked), tmp_path]
    ranks = [
        subprocess.Popen(command, cwd=REPOSITORY, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    (told,) = json.loads((tmp_path / "0.json").read_text())
    assert told.startswith("failed: reading, rank 1: did not come back within 60 s")
    assert json.loads((tmp_path / "1.json").read_text()) == [told]
