import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from nestdata import AudioNoiseBatch, PlanConfig, prepare_corpus
from nestmodel import (
    CheckpointConfig,
    Checkpoints,
    CheckReport,
    CheckResult,
    DataConfig,
    NestDataModule,
    NestModel,
    PreflightConfig,
    PreflightReport,
    TrainingError,
    run_preflight,
)
from nestmodel.preflight import checks
from nestmodel.preflight.checks import budget_note, loader_note
from nestmodel.preflight.ranks import compare_ranks
from nestmodel.preflight.trial import largest_shapes
from tests.conftest import MessyCorpora
from tests.extras import needs
from tests.ports import free_port
from tests.synthesis import folder_corpus, hiss
from tests.training import tiny_config, trainer

REPOSITORY = Path(__file__).parents[3]
Usage = namedtuple("Usage", "total used free")


def results_of(report: PreflightReport, rank: int = 0) -> dict[str, CheckResult]:
    return {check.name: check.ranks[rank] for check in report.checks}


def readable_data(corpora: MessyCorpora, *, num_workers: int = 0, seconds: float = 10.0) -> NestDataModule:
    """Data without unreadable audio."""
    plan = PlanConfig(max_batch_seconds=seconds, microbatches_per_step=2)
    return NestDataModule(DataConfig(corpora.speech, corpora.banked, plan=plan, num_workers=num_workers))


def hissing_data(directory: Path, *, num_workers: int = 0) -> NestDataModule:
    """Data of eight files of one second, in `speech`."""
    corpus = folder_corpus(directory / "speech", {f"{i}.wav": hiss(16000, i) for i in range(8)})
    plan = PlanConfig(max_batch_seconds=4.0, microbatches_per_step=1)
    return NestDataModule(DataConfig(corpus.path, plan=plan, num_workers=num_workers))


def result(status: Any = "ok", value: str = "", **figures: float) -> CheckResult:
    return CheckResult(status=status, value=value, advice="do it" if status == "failed" else "", figures=figures)


def test_every_check_passes_in_order_and_changes_neither_model_nor_trainer_nor_random_state(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    model, runner, random = NestModel(tiny_config()).eval(), trainer(tmp_path), torch.get_rng_state()
    data, reports = readable_data(messy_corpora, num_workers=1), []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = run_preflight(model, data, runner, on_report=reports.append)
    assert reports == [report]
    status = {"step": "ok", "shards": "skipped", "audio": "ok", "disk": "ok", "ranks": "skipped"}
    assert {check.name: check.status for check in report.checks} == status
    assert [check.name for check in report.checks] == list(status)
    assert report.problems() == []
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True
    step, audio, disk = (results_of(report)[name] for name in ("step", "audio", "disk"))
    assert step.figures["peak_bytes"] > 0.1e9
    rates = audio.figures["audio_s_per_s"], 1, step.figures["step_audio_s_per_s"]
    assert report.notes()[0] == f"audio: {loader_note(*rates)}"
    assert disk.figures["checkpoint_bytes"] == 12 * sum(parameter.numel() for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training
    assert runner.global_step == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert list(tmp_path.iterdir()) == []
    runner.fit_loop.epoch_loop.max_steps = 1  # on a single device, the same trainer can train afterwards
    runner.fit(model, datamodule=readable_data(messy_corpora))
    assert runner.global_step == 1


@needs("vad", "silero_vad")
@pytest.mark.parametrize("is_swapped", [False, True])
def test_speech_and_noise_without_transcripts_that_are_swapped_are_told(is_swapped: bool, tmp_path: Path) -> None:
    speech, noise = tmp_path / "speech.corpus", tmp_path / "noise.corpus"
    for corpus in (speech, noise):  # folders of real recordings
        prepare_corpus(REPOSITORY / "manifests/demo" / corpus.stem, corpus)
    if is_swapped:
        speech, noise = noise, speech
    plan = PlanConfig(max_batch_seconds=60.0)
    data = NestDataModule(DataConfig(speech, noise, plan=plan, num_workers=0))
    check = checks.check_audio(data, trainer(tmp_path), 3)
    assert (check.status == "warning", "may be swapped" in check.advice) == (is_swapped, is_swapped)


def test_a_full_disk_fails_with_its_size_and_too_little_memory_is_a_warning(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1000))
    monkeypatch.setattr(checks, "usable_bytes", lambda *_: 10**6)
    runner = trainer(tmp_path, [Checkpoints(CheckpointConfig(keep=3))], enable_checkpointing=True)
    report = run_preflight(NestModel(tiny_config()), readable_data(messy_corpora), runner)
    assert report.has_failed
    step, disk = results_of(report)["step"], results_of(report)["disk"]
    assert (step.status, disk.status) == ("warning", "failed")
    assert disk.value.startswith("0.0 MB free, 4 checkpoints of 0.")
    assert str(tmp_path) in disk.advice
    assert results_of(report)["audio"].status == "ok"


def test_an_unreadable_corpus_fails_its_check_and_the_other_checks_continue(tmp_path: Path) -> None:
    data = hissing_data(tmp_path, num_workers=1)
    for path in (tmp_path / "speech").glob("*.wav"):
        path.write_bytes(b"no audio")
    report = run_preflight(NestModel(tiny_config()), data, trainer(tmp_path))
    assert report.has_failed
    audio = results_of(report)["audio"]
    assert audio.status == "failed"
    assert ".wav" in audio.advice
    assert "Traceback" not in audio.advice
    assert results_of(report)["step"].status == "ok"
    assert any(line.startswith("failed: audio, rank 0: step 0") for line in report.problems())


def test_an_unusable_cut_is_a_warning_with_its_id_and_reason(tmp_path: Path) -> None:
    data = hissing_data(tmp_path)
    (tmp_path / "speech" / "3.wav").unlink()
    config = PreflightConfig(num_batches=data.plan.steps_per_epoch)
    report = run_preflight(NestModel(tiny_config()), data, trainer(tmp_path), config)
    audio = results_of(report)["audio"]
    assert audio.status == "warning"
    assert "3 (missing)" in audio.advice
    assert not report.has_failed


def test_a_step_that_runs_out_of_memory_fails_and_names_its_shape(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(self: NestModel, batch: AudioNoiseBatch, batch_idx: int) -> torch.Tensor:  # noqa: ARG001
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(NestModel, "training_step", limited)
    data = readable_data(messy_corpora, seconds=20.0)
    report = run_preflight(NestModel(tiny_config()), data, trainer(tmp_path))
    step, audio = results_of(report)["step"], results_of(report)["audio"]
    assert step.status == "failed"
    num_cuts, num_samples = largest_shapes(data.plan)[0]
    assert step.advice.startswith(f"a batch of {num_cuts} x {num_samples / 16000:.1f} s does not fit: CUDA out of mem")
    assert "data.plan.max_batch_seconds (now 20)" in step.advice
    assert audio.status == "ok"
    assert not any("step takes" in note for note in audio.notes)


class Work:
    """A sum over ranks."""

    def __init__(self, *, is_complete: bool) -> None:
        self.is_completed = lambda: is_complete

    def wait(self) -> None:
        pass


def test_a_rank_fails_if_its_settings_differ_from_those_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: Work(is_complete=True))
    one = {"data.plan.fingerprint": "'abc'", "data.plan.seed": "0", **{f"s{i}": "0" for i in range(9)}}
    other, poorer = {**one, "data.plan.seed": "1"}, {"data.plan.fingerprint": "'abc'"}
    results = [compare_ranks([one, other, one, poorer], rank, torch.device("cpu"), 1.0) for rank in range(4)]
    assert [result.status for result in results] == ["ok", "failed", "ok", "failed"]
    assert results[0].value == "11 settings, plan abc"
    assert results[1].advice.startswith("data.plan.seed: 1 here, 0 on rank 0. Give every rank the same ")
    assert results[3].advice.startswith("data.plan.seed: (absent) here, 0 on rank 0; ")
    assert "and 5 more" in results[3].advice


def test_a_sum_over_ranks_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: Work(is_complete=False))
    with pytest.raises(TrainingError, match=r"a sum over ranks was not complete after 0\.1 s"):
        compare_ranks([{}, {}], 0, torch.device("cpu"), 0.1)


@pytest.mark.parametrize(
    ("microbatches", "peak", "num_ranks", "options"),
    [
        (16, 36, 8, "--max-batch-seconds 4000 --microbatches-per-step 8"),
        (16, 37, 8, None),  # twice of it leaves less than a tenth of 81
        (16, 36, 16, None),
        (15, 36, 1, None),
        (1, 36, 1, None),
    ],
)
def test_twice_the_budget_is_named_if_memory_and_ranks_allow_it(
    microbatches: int, peak: int, num_ranks: int, options: str | None
) -> None:
    plan = PlanConfig(max_batch_seconds=2000.0, microbatches_per_step=microbatches)
    notes = budget_note(plan, peak, 81, num_ranks)
    assert [note.rpartition(", ")[2] for note in notes] == ([] if options is None else [options])


def test_a_check_has_the_status_of_its_worst_rank_and_shows_its_value() -> None:
    check = CheckReport(name="audio", ranks=(result(value="fast", s=1.0), result(value="slow", s=3.0)))
    assert (check.status, check.summary) == ("ok", "slow (rank 1)")
    check = CheckReport(name="disk", ranks=(result("skipped", "other rank", s=9.0), result("failed", "full")))
    assert (check.status, check.summary) == ("failed", "full (rank 1)")
    assert CheckReport(name="disk", ranks=(result(value="same"),) * 2).summary == "same"
    report = PreflightReport(world_size=2, device="cpu", checks=(check,))
    assert report.problems() == ["failed: disk, rank 1: do it"]


_TWO_RANKS = """
import json, os, sys, time
from pathlib import Path
import nestmodel.preflight.checks
from nestdata import AudioNoiseDataset
from nestmodel import NestModel, PreflightConfig, run_preflight
from nestmodel.preflight.exchange import StoreExchange
from tests.conftest import MessyCorpora
from tests.training import messy_data, tiny_config, trainer

rank, directory = int(os.environ["RANK"]), Path(sys.argv[3])
reported = directory / "reported"


class Exchange(StoreExchange):
    def all_gather(self, topic, value):
        self._timeout_s = 1.0 if topic == "audio" else 200.0
        return super().all_gather(topic, value)


def read_after_the_report(*_):
    while not reported.exists():
        time.sleep(0.05)
    raise ValueError


if rank == 1:
    AudioNoiseDataset.load = read_after_the_report
nestmodel.preflight.checks.StoreExchange = Exchange
data = messy_data(MessyCorpora(Path(sys.argv[1]), Path(sys.argv[2]), Path(), Path()))
runner = trainer(directory, devices=2, strategy="ddp")
config = PreflightConfig(timeout_s=200.0)
report = run_preflight(NestModel(tiny_config()), data, runner, config, lambda _: reported.touch())
(directory / f"{rank}.json").write_text(json.dumps(report.problems()))
"""


@pytest.mark.faults
@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_named_and_does_not_block_the_others(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port())
    command = [sys.executable, "-c", _TWO_RANKS, str(messy_corpora.speech), str(messy_corpora.banked), tmp_path]
    ranks = [
        subprocess.Popen(command, cwd=REPOSITORY, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [rank.wait(240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    (problem,) = json.loads((tmp_path / "0.json").read_text())
    assert problem.startswith("failed: audio, rank 1: did not answer within 200 s")
    assert json.loads((tmp_path / "1.json").read_text()) == [problem]
