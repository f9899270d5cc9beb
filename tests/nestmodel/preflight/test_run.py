import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
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
    FeatureConfig,
    NestDataModule,
    NestModel,
    PreflightConfig,
    PreflightReport,
    run_preflight,
)
from nestmodel.preflight.budget.shapes import critical_shapes
from nestmodel.preflight.checks import check_restarts
from nestmodel.preflight.settings import ERROR, changed_settings, compare_settings
from tests.conftest import MessyCorpora
from tests.ports import free_port
from tests.synthesis import folder_corpus, hiss
from tests.training import tiny_config, trainer

REPOSITORY = Path(__file__).parents[3]
NAMES = ["settings", "restarts", "disk", "shared memory", "shards", "reading", "training step", "feeding", "store"]
NAMES += ["collectives"]
SHORT = PreflightConfig(feeding_seconds=0.1)
WITHOUT_FEEDING = PreflightConfig(feeding_seconds=0.0)
Usage = namedtuple("Usage", "total used free")


def results_of(report: PreflightReport, rank: int = 0) -> dict[str, CheckResult]:
    return {check.name: check.ranks[rank] for check in report.checks}


def readable_data(corpora: MessyCorpora, *, num_workers: int = 0, seconds: float = 10.0) -> NestDataModule:
    """Data without unreadable audio."""
    plan = PlanConfig(max_batch_seconds=seconds, microbatches_per_step=2)
    return NestDataModule(corpora.speech, corpora.banked, plan=plan, num_workers=num_workers)


def result(status: Any = "ok", value: str = "", **figures: float) -> CheckResult:
    return CheckResult(status=status, value=value, advice="do it" if status == "failed" else "", figures=figures)


def test_every_check_passes_in_order_if_nothing_is_wrong(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    data, reports = readable_data(messy_corpora, num_workers=1), []
    report = run_preflight(NestModel(tiny_config()), data, trainer(tmp_path), SHORT, reports.append)
    assert reports == [report]
    assert [check.name for check in report.checks] == NAMES
    status = {check.name: check.status for check in report.checks}
    # Whether the loader feeds the step depends on the speed of the machine.
    assert status.pop("feeding") in ("ok", "warning")
    skipped = dict.fromkeys(("restarts", "shards", "store", "collectives"), "skipped")
    assert status == {**dict.fromkeys(NAMES[:-3], "ok"), **skipped}
    assert [line for line in report.problems() if not line.startswith("warning: feeding")] == []
    assert not report.has_failed
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True
    reading, step = results_of(report)["reading"], results_of(report)["training step"]
    assert reading.value.startswith("3 read")
    assert step.figures["peak_bytes"] > 0.1e9
    assert results_of(report)["disk"].figures["checkpoint_bytes"] == 12 * sum(
        parameter.numel() for parameter in NestModel(tiny_config()).parameters()
    )


def test_feeding_is_measured_on_the_corpus_and_explained(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    data = readable_data(messy_corpora, num_workers=1)
    report = run_preflight(NestModel(tiny_config()), data, trainer(tmp_path), SHORT)
    feeding = results_of(report)["feeding"]
    figures = feeding.figures
    assert figures["delivered_0_workers"] > 0
    assert figures["delivered_1_workers"] > 0
    assert figures["step_audio_s_per_s"] > 0
    assert 0 < figures["bank_s_per_audio_s"] < figures["decode_s_per_audio_s"]
    corpus = data.train_dataset.corpus.corpora[0]
    assert figures["pcm_bytes"] == pytest.approx(corpus.hours * 3600 * 2 * corpus.sampling_rate)
    rates, verdict, pcm, disk = feeding.notes
    assert rates.startswith("steps take ")
    assert "bottleneck" in verdict
    assert pcm.startswith("preparing the speech with --pcm ")
    assert "from the disk as it is stored" in disk
    assert report.notes() == [f"feeding: {note}" for note in feeding.notes]
    assert json.loads(json.dumps(report.as_dict()))["checks"][-3]["ranks"][0]["notes"] == list(feeding.notes)


def test_feeding_can_be_left_out(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    data = readable_data(messy_corpora)
    report = run_preflight(NestModel(tiny_config()), data, trainer(tmp_path), WITHOUT_FEEDING)
    assert results_of(report)["feeding"].status == "skipped"
    assert report.notes() == []


def test_look_ahead_and_delay_are_shown_if_attention_has_a_limit(messy_corpora: MessyCorpora, tmp_path: Path) -> None:
    config = tiny_config(
        att_context_size=((70, 13), (70, 0)),
        att_context_style="chunked_limited",
        conv_context_size="causal",
        causal_downsampling=True,
    )
    config = replace(config, features=FeatureConfig(normalize="NA"))
    report = run_preflight(NestModel(config), readable_data(messy_corpora), trainer(tmp_path), WITHOUT_FEEDING)
    assert [check.name for check in report.checks] == [NAMES[0], "look-ahead", *NAMES[1:]]
    assert report.checks[1].status == "ok"
    assert report.checks[1].summary == "70,13: 1.05 s, delay 1.06 s; 70,0: 0.0125 s, delay 0.016 s"


def test_a_preflight_leaves_no_files_and_does_not_change_model_trainer_or_random_state(
    messy_corpora: MessyCorpora, tmp_path: Path
) -> None:
    model, runner, random = NestModel(tiny_config()).eval(), trainer(tmp_path), torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run_preflight(model, readable_data(messy_corpora), runner, SHORT)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training
    with pytest.raises(RuntimeError, match="not attached to a `Trainer`"):
        _ = model.trainer
    assert runner.global_step == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert list(tmp_path.iterdir()) == []
    runner.fit_loop.epoch_loop.max_steps = 1  # on a single device, the same trainer can train afterwards
    runner.fit(model, datamodule=readable_data(messy_corpora))
    assert runner.global_step == 1


def test_a_full_disk_and_too_little_memory_fail_with_their_sizes(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1000))
    monkeypatch.setattr("nestmodel.preflight.checks.available_bytes", lambda: 1000)
    data = readable_data(messy_corpora, num_workers=1)
    report = run_preflight(
        NestModel(tiny_config()),
        data,
        trainer(tmp_path, [Checkpoints(keep=3)], enable_checkpointing=True),
        WITHOUT_FEEDING,
    )
    assert report.has_failed
    disk, shared = results_of(report)["disk"], results_of(report)["shared memory"]
    assert disk.value.startswith("0.0 MB free, 4 checkpoints of 0.")
    assert str(tmp_path) in disk.advice
    loader = data.train_dataset.loader([], num_workers=1)
    assert shared.figures["needed_bytes"] == loader.shared_bytes == 6 * loader.shared_bytes // loader.num_slots
    assert "Lower data.num_workers" in shared.advice
    results = results_of(report)
    assert [results[name].status for name in ("settings", "reading", "training step")] == ["ok"] * 3


def test_restarts_that_can_read_addresses_of_the_previous_attempt_are_a_warning() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    warning = check_restarts(torchrun)
    assert warning.status == "warning"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in warning.advice
    assert check_restarts({**torchrun, "TORCHELASTIC_USE_AGENT_STORE": "False"}).status == "ok"
    assert check_restarts({**torchrun, "TORCHELASTIC_MAX_RESTARTS": "0"}).status == "ok"
    assert check_restarts({}).status == "skipped"


def test_permanent_checkpoints_that_will_not_fit_are_a_warning(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = 12 * sum(parameter.numel() for parameter in NestModel(tiny_config()).parameters())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 10 * each))
    callback = Checkpoints(keep=2, keep_every_n_steps=10)
    runner = trainer(tmp_path / "new" / "run", [callback], enable_checkpointing=True, max_steps=100)
    data = readable_data(messy_corpora)
    disk = results_of(run_preflight(NestModel(tiny_config()), data, runner, WITHOUT_FEEDING))["disk"]
    assert disk.status == "warning"
    assert "keep_every_n_steps" in disk.advice


def test_an_unreadable_corpus_fails_its_check_and_the_other_checks_continue(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.wav": hiss(16000, i) for i in range(4)})
    for path in (tmp_path / "speech").glob("*.wav"):
        path.write_bytes(b"no audio")
    data = NestDataModule(corpus.path, plan=PlanConfig(max_batch_seconds=4.0, microbatches_per_step=1), num_workers=0)
    report = run_preflight(NestModel(tiny_config()), data, trainer(tmp_path))
    assert report.has_failed
    reading = results_of(report)["reading"]
    assert reading.status == "failed"
    assert ".wav" in reading.advice
    assert results_of(report)["training step"].status == "ok"
    assert any(line.startswith("failed: reading, rank 0: step 0") for line in report.problems())


def test_an_error_of_a_loader_process_is_described_without_its_traceback(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.wav": hiss(16000, i) for i in range(4)})
    for path in (tmp_path / "speech").glob("*.wav"):
        path.write_bytes(b"no audio")
    data = NestDataModule(corpus.path, plan=PlanConfig(max_batch_seconds=4.0, microbatches_per_step=1), num_workers=1)
    reading = results_of(run_preflight(NestModel(tiny_config()), data, trainer(tmp_path)))["reading"]
    assert reading.status == "failed"
    assert reading.advice.startswith("step 0")
    assert "Traceback" not in reading.advice


def test_an_unusable_cut_is_a_warning_with_its_id_and_reason(tmp_path: Path) -> None:
    corpus = folder_corpus(tmp_path / "speech", {f"{i}.wav": hiss(16000, i) for i in range(8)})
    (tmp_path / "speech" / "3.wav").unlink()
    data = NestDataModule(corpus.path, plan=PlanConfig(max_batch_seconds=4.0, microbatches_per_step=1), num_workers=0)
    config = replace(WITHOUT_FEEDING, num_batches=data.train_dataset.plan.steps_per_epoch)
    report = run_preflight(NestModel(tiny_config()), data, trainer(tmp_path), config)
    reading = results_of(report)["reading"]
    assert reading.status == "warning"
    assert "3 (missing)" in reading.advice
    assert not report.has_failed


@pytest.mark.parametrize(
    ("fitting_s", "advice"), [(6.5, r"to about 5; or set"), (0.5, r"nor does 5, .* is too large\. Lower it, and set")]
)
def test_a_step_that_runs_out_of_memory_fails_and_names_a_budget_that_fits(
    fitting_s: float, advice: str, messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = NestModel.training_step

    def limited(self: NestModel, batch: AudioNoiseBatch, batch_idx: int) -> torch.Tensor:
        if batch.audio.numel() > fitting_s * 16000:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(NestModel, "training_step", limited)
    report = run_preflight(NestModel(tiny_config()), readable_data(messy_corpora, seconds=20.0), trainer(tmp_path))
    memory = results_of(report)["training step"]
    assert memory.status == "failed"
    assert "data.plan.max_batch_seconds (now 20)" in memory.advice
    assert re.search(advice, memory.advice), memory.advice


def test_any_other_error_fails_only_its_own_check(
    messy_corpora: MessyCorpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(NestModel, "training_step", broken)
    report = run_preflight(NestModel(tiny_config()), readable_data(messy_corpora), trainer(tmp_path))
    assert report.problems() == ["failed: training step, rank 0: no such kernel"]


def test_a_corpus_at_another_sampling_rate_than_the_model_fails(tmp_path: Path) -> None:
    audio = {f"{i}.wav": hiss(16000, i) for i in range(3)}
    corpus = folder_corpus(tmp_path / "speech", audio, PrepareConfig(sampling_rate=8000))
    data = NestDataModule(corpus.path, plan=PlanConfig(max_batch_seconds=4.0, microbatches_per_step=1), num_workers=0)
    report = run_preflight(NestModel(tiny_config()), data, trainer(tmp_path))
    (problem,) = report.problems()
    assert problem.startswith("failed: training step, rank 0: the corpus is at 8000 Hz, the model for 16000 Hz")


def test_the_first_critical_shapes_have_the_most_samples_and_the_longest_cuts() -> None:
    lengths = np.sort(np.concatenate([np.full(64, 16000), np.full(8, 99_000)]))
    plan = BatchPlan(lengths, 16000, PlanConfig(max_batch_seconds=10.0, microbatches_per_step=1))
    assert critical_shapes(plan)[:2] == [(10, 16000), (1, 99_000)]


def test_a_rank_fails_if_its_settings_differ_from_most_ranks_or_in_a_tie_from_rank_0() -> None:
    one, other = {"data.plan.seed": "0", "version of torch": "2"}, {"data.plan.seed": "1", "version of torch": "2"}
    assert [r.status for r in compare_settings([other, one, one])] == ["failed", "ok", "ok"]
    assert [r.status for r in compare_settings([one, other])] == ["ok", "failed"]
    (_, result) = compare_settings([one, {"version of torch": "2"}])
    assert result.advice.startswith("data.plan.seed: (absent) here, 0 elsewhere")
    many = compare_settings([{f"s{i}": "0" for i in range(9)}, {f"s{i}": "1" for i in range(9)}])
    assert "and 4 more" in many[1].advice
    assert [r.status for r in compare_settings([{ERROR: "no lhotse"}] * 2)] == ["failed"] * 2
    failed, fine = compare_settings([{ERROR: "no lhotse"}, one])
    assert (failed.status, failed.advice, fine.status) == ("failed", "no lhotse", "ok")


def test_changed_settings_are_named_with_both_values() -> None:
    before, now = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "c": "4", "d": "5"}
    assert changed_settings(before, now) == [("b", "2", "(absent)"), ("c", "3", "4"), ("d", "(absent)", "5")]
    assert changed_settings(before, before) == []


def test_a_check_has_the_status_of_its_worst_rank_and_shows_its_value() -> None:
    check = CheckReport(name="reading", ranks=(result(value="fast", s=1.0), result(value="slow", s=3.0)))
    assert (check.status, check.summary) == ("ok", "slow (rank 1)")
    check = CheckReport(name="disk", ranks=(result("skipped", "other rank", s=9.0), result("failed", "full")))
    assert (check.status, check.summary) == ("failed", "full (rank 1)")
    assert CheckReport(name="disk", ranks=(result(value="same"),) * 2).summary == "same"
    report = PreflightReport(world_size=2, device="cpu", checks=(check,))
    assert report.problems() == ["failed: disk, rank 1: do it"]


def test_invalid_settings_and_results_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_batches is 0"):
        PreflightConfig(num_batches=0)
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        PreflightConfig(timeout_s=0.0)
    with pytest.raises(ConfigError, match="feeding_seconds is -1"):
        PreflightConfig(feeding_seconds=-1.0)
    with pytest.raises(ConfigError, match="store_seconds is -1"):
        PreflightConfig(store_seconds=-1.0)
    with pytest.raises(ConfigError, match="the name of a check is empty"):
        CheckReport(name="", ranks=(result(),))
    with pytest.raises(ConfigError, match="no results"):
        CheckReport(name="disk", ranks=())
    with pytest.raises(ConfigError, match="world_size is 3"):
        PreflightReport(world_size=3, device="cpu", checks=(CheckReport(name="disk", ranks=(result(),)),))


_TWO_RANKS = """
import json, os, sys, time
from pathlib import Path
import nestmodel.preflight.run
from nestdata import AudioNoiseDataset
from nestmodel import NestModel, PreflightConfig, run_preflight
from nestmodel.preflight.exchange import StoreExchange
from tests.conftest import MessyCorpora
from tests.training import messy_data, tiny_config, trainer

rank, directory = int(os.environ["RANK"]), Path(sys.argv[3])
reported = directory / "reported"


class Exchange(StoreExchange):
    def all_gather(self, topic, value):
        self._timeout_s = 1.0 if topic == "reading" else 200.0
        return super().all_gather(topic, value)


def read_after_the_report(*_):
    while not reported.exists():
        time.sleep(0.05)
    raise ValueError


if rank == 1:
    AudioNoiseDataset.load = read_after_the_report
nestmodel.preflight.run.StoreExchange = Exchange
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
    assert problem.startswith("failed: reading, rank 1: did not answer within 200 s")
    assert json.loads((tmp_path / "1.json").read_text()) == [problem]
