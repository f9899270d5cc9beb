import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

import nestguard
from nestdata import BatchPlan, PlanConfig
from nestmodel import Checkpoints, ConfigError, Kernels, NestModel, PreemptionHandler
from nestmodel.formats.training_record import SETTINGS_KEY
from nestmodel.nn.gpu.kernel_choice import default_kernels
from nestmodel.training.module import _DEVICE_KEY
from nestmodel.training.saving.checkpoint_files import find_checkpoints
from nestmodel.training.starting import kernel_race
from nestmodel.training.starting.kernel_race import most_frequent_shape
from nestmodel.tuning.cache import Result, cache_path
from nestmodel.tuning.race import Part
from tests.conftest import MessyCorpora
from tests.nestmodel.tuning.test_parts import FULL, SETTING
from tests.planted_forms import Planted, plant_forms
from tests.training import messy_data, tiny_config, trainer

SLOW, FAST = Planted(1.0), Planted(0.5)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def algorithms() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


class Run:
    """Fits models for two steps, and saves each step."""

    def __init__(self, corpora: MessyCorpora, directory: Path) -> None:
        self._corpora, self._directory = corpora, directory

    def __call__(
        self, kernels: Kernels = Kernels(), callbacks: list[pl.Callback] | None = None, **settings: Any
    ) -> NestModel:
        model = NestModel(tiny_config(), kernels=kernels)
        ckpt_path = settings.pop("ckpt_path", None)
        saver = Checkpoints(every_n_steps=1, directory=self._directory / "saved")
        settings = {"max_steps": 2, "enable_checkpointing": True, **settings}
        runner = trainer(self._directory, [saver, *(callbacks or [])], **settings)
        runner.fit(model, datamodule=messy_data(self._corpora), ckpt_path=ckpt_path)
        return model

    def checkpoint(self, change: Callable[[dict[str, Any]], None] = lambda _: None) -> Path:
        """Returns the first checkpoint, in which `change` has replaced something."""
        path = next(found.path for found in find_checkpoints(self._directory / "saved") if found.step == 1)
        checkpoint = torch.load(path, weights_only=False)
        change(checkpoint)
        torch.save(checkpoint, self._directory / "changed.ckpt")
        return self._directory / "changed.ckpt"


@pytest.fixture
def run(messy_corpora: MessyCorpora, tmp_path: Path) -> Run:
    return Run(messy_corpora, tmp_path)


def form(model: NestModel) -> str:
    assert model._chosen is not None
    assert model.encoder.pre_encode.has_joined_stages == (model._chosen.kernels.subsampling == "triton")
    return model._chosen.kernels.subsampling


def test_nothing_is_raced_on_a_cpu(run: Run) -> None:
    model = run()
    assert model._chosen is not None
    assert model._chosen.kernels == Kernels(features="torch", subsampling="torch", blocks="torch", step="torch")
    assert not cache_path().exists()


def test_on_a_gpu_parts_that_are_not_set_by_hand_are_raced_unless_bits_must_be_equal() -> None:
    device = torch.device("cuda")
    assert kernel_race.raced_parts(device, Kernels(blocks="torch")) == ["features", "subsampling", "step"]
    torch.use_deterministic_algorithms(True)
    assert kernel_race.raced_parts(device, Kernels()) == []


def test_the_fastest_form_is_raced_once_and_then_read_from_the_cache(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    races = plant_forms(monkeypatch.setattr, SLOW, FAST)
    with caplog.at_level(logging.INFO):
        assert form(run()) == "triton"
    assert "racing kernels on cpu, for " in caplog.text
    assert "subsampling  triton  500.000 ms" in caplog.text
    assert races == [["subsampling"]]
    assert form(run()) == "triton"
    assert len(races) == 1
    cache_path().unlink()
    run()
    assert len(races) == 2


@pytest.mark.parametrize("wrong", [Planted(0.1, error=1.0), Planted(0.1, error=float("nan"))])
def test_a_wrong_form_is_named_and_the_run_goes_on(
    run: Run, wrong: Planted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant_forms(monkeypatch.setattr, SLOW, wrong)
    with caplog.at_level(logging.INFO):
        model = run()
    assert form(model) == "torch"
    assert model.trainer.global_step == 2
    assert "wrong: " in caplog.text


def test_a_form_that_is_set_by_hand_is_not_raced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    races = plant_forms(monkeypatch.setattr, SLOW, FAST)
    assert form(run(Kernels(subsampling="torch"))) == "torch"
    assert races == []


def race_subsampling() -> Result:
    return kernel_race._raced(["subsampling"], Kernels(), SETTING, FULL, lambda: False)


def test_a_race_leaves_torchs_generators_and_compiler_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = torch._dynamo.config.recompile_limit

    class Draws(Planted):
        def __call__(self) -> list[torch.Tensor]:
            torch._dynamo.config.recompile_limit = 1000
            torch.randn(3)
            return list(super().__call__())

    plant_forms(monkeypatch.setattr, Draws(1.0), FAST)
    torch.manual_seed(3)
    expected = torch.randn(1)
    torch.manual_seed(3)
    result = race_subsampling()
    assert result.kernels.subsampling == "triton"
    assert torch.equal(torch.randn(1), expected)
    assert torch._dynamo.config.recompile_limit == limit


def test_a_resume_takes_the_choice_of_its_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_forms(monkeypatch.setattr, SLOW, FAST)
    first = run()
    races = plant_forms(monkeypatch.setattr, FAST, SLOW)
    cache_path().unlink()
    resumed = run(ckpt_path=run.checkpoint())
    assert form(resumed) == "triton"
    assert races == []
    for before, after in zip(first.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(before, after)


def test_a_resume_on_another_kind_of_device_races_anew_and_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant_forms(monkeypatch.setattr, SLOW, FAST)
    run()
    races = plant_forms(monkeypatch.setattr, FAST, SLOW)
    cache_path().unlink()
    with caplog.at_level(logging.INFO):
        resumed = run(ckpt_path=run.checkpoint(lambda checkpoint: checkpoint.update({_DEVICE_KEY: "a GPU"})))
    assert form(resumed) == "torch"
    assert len(races) == 1
    assert "the kernels of the checkpoint were chosen on a GPU: they are chosen anew on cpu." in caplog.text


def test_another_form_by_hand_warns_on_resume_unless_the_run_is_deterministic(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_forms(monkeypatch.setattr, SLOW, FAST)
    run()
    by_hand = Kernels(subsampling="torch")
    with pytest.warns(
        UserWarning, match=r"model\.kernels\.subsampling has changed since the checkpoint, from 'triton'"
    ):
        assert form(run(by_hand, ckpt_path=run.checkpoint())) == "torch"
    run(deterministic=True)
    with pytest.raises(ConfigError, match=r"model\.kernels\.subsampling: 'triton' -> 'torch'"):
        run(by_hand, ckpt_path=run.checkpoint(), deterministic=True)


@pytest.mark.parametrize(("compiled", "blocks"), [("False", "torch"), ("True", "compiled")])
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # from torch's compiler
@pytest.mark.filterwarnings("ignore:model.kernels.blocks is compiled:UserWarning")
def test_a_checkpoint_from_before_kernels_were_chosen_goes_on_with_what_it_had(
    run: Run, compiled: str, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    races = plant_forms(monkeypatch.setattr, SLOW, FAST)

    def make_old(checkpoint: dict[str, Any]) -> None:
        settings = checkpoint[SETTINGS_KEY]
        for name in [name for name in settings if name.startswith("model.kernels.")]:
            del settings[name]
        settings["model.compile_blocks"] = compiled
        del checkpoint[_DEVICE_KEY]

    resumed = run(ckpt_path=run.checkpoint(make_old), max_steps=1)
    assert resumed._chosen is not None
    assert resumed._chosen.kernels == Kernels(features="torch", subsampling="torch", blocks=blocks, step="torch")  # type: ignore[arg-type]
    assert races == []


def test_a_form_that_this_version_does_not_know_is_an_error(run: Run) -> None:
    run()

    def change(checkpoint: dict[str, Any]) -> None:
        checkpoint[SETTINGS_KEY]["model.kernels.blocks"] = "'fused'"

    with pytest.raises(ConfigError, match="the form of blocks is 'fused': expected one of auto, torch, compiled"):
        run(ckpt_path=run.checkpoint(change))


def test_a_preempted_race_ends_early_and_is_repeated_on_resume(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Signals(Planted):
        def __call__(self) -> list[torch.Tensor]:
            os.kill(os.getpid(), signal.SIGTERM)
            return list(super().__call__())

    plant_forms(monkeypatch.setattr, Signals(1.0), FAST)
    with pytest.raises(SystemExit):
        run(callbacks=[PreemptionHandler()])
    assert not cache_path().exists()
    races = plant_forms(monkeypatch.setattr, SLOW, FAST)
    assert form(run(ckpt_path=run.checkpoint())) == "triton"
    assert len(races) == 1


def test_heartbeats_are_written_while_the_race_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[nestguard.Phase] = []

    class Heartbeats(nestguard.NoHeartbeat):
        def beat(self, phase: nestguard.Phase, *_: Any, **__: Any) -> None:
            seen.append(phase)

    races = plant_forms(monkeypatch.setattr, SLOW, FAST)
    monkeypatch.setattr(nestguard, "current", Heartbeats)
    race_subsampling()
    assert len(races) == 1
    # The reference, two forms, and four measurements.
    assert seen == [nestguard.Phase.STARTING] * 7


def test_the_most_frequent_shape_is_that_of_most_steps() -> None:
    lengths = [16000] * 40 + [48000] * 4
    plan = BatchPlan(lengths, 16000, PlanConfig(max_batch_seconds=8.0, microbatches_per_step=1))
    numbers = {bucket.padded_samples: bucket.num_groups for bucket in plan.buckets}
    cuts, samples = most_frequent_shape(plan)
    assert samples == 16000
    assert numbers[16000] == max(numbers.values())
    assert cuts <= 8


def test_a_whole_step_is_raced_last_with_the_forms_that_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Kernels] = []

    def step_part(_setting: object, _precision: object, kernels: Kernels) -> Part:
        given.append(kernels)
        forms = {"torch": lambda: SLOW, "graph": lambda: FAST}
        return Part(name="step", reference=lambda: SLOW, forms=forms, ulp=1e-7)

    plant_forms(monkeypatch.setattr, SLOW, FAST)
    monkeypatch.setattr(kernel_race, "step_part", step_part)
    names = ["subsampling", "step"]
    monkeypatch.setattr(kernel_race, "parts", partial(_without_step, kernel_race.parts))
    result = kernel_race._raced(names, Kernels(blocks="combined"), SETTING, FULL, lambda: False)
    assert given == [Kernels(features="torch", subsampling="triton", blocks="combined", step="torch")]
    assert result.kernels.step == "graph"
    varying = replace(SETTING, num_shapes=None)
    assert kernel_race._raced(names, Kernels(), varying, FULL, lambda: False).kernels.step == "torch"


def _without_step(parts: Callable[..., list[Part]], setting: object, precision: object, names: list[str]) -> list[Part]:
    return parts(setting, precision, [name for name in names if name != "step"])


def note_raced(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces races; returns a list to which each adds the names of its parts."""
    raced: list[list[str]] = []

    def note(names: list[str], *_: object) -> Result:
        raced.append(names)
        return Result(device="cpu", kernels=default_kernels("cpu"), rows=())

    monkeypatch.setattr(kernel_race, "_raced", note)
    return raced


@pytest.mark.parametrize(("world_size", "is_raced"), [(1, True), (2, True), (4, False)])
def test_a_whole_step_is_raced_if_a_rank_has_a_microbatch_that_may_be_a_graph(
    world_size: int, is_raced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raced = note_raced(monkeypatch)
    monkeypatch.setattr(kernel_race, "raced_parts", lambda *_: ["blocks", "step"])
    runner = trainer(tmp_path)
    monkeypatch.setattr(type(runner), "world_size", world_size)
    plan = BatchPlan([16000] * 40, 16000, PlanConfig(max_batch_seconds=8.0, microbatches_per_step=4))
    kernel_race.race(Kernels(), tiny_config(), runner, plan, reads_cache=False)
    assert raced == [["blocks", "step"] if is_raced else ["blocks"]]


def test_a_run_goes_on_if_its_race_cannot_be_held(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_forms(monkeypatch.setattr, SLOW, FAST)

    def fail(*_: object) -> Result:
        raise RuntimeError("planted")

    monkeypatch.setattr(kernel_race, "_raced", fail)
    with pytest.warns(UserWarning, match=r"not raced \(planted\), and those without a race are used"):
        model = run()
    assert form(model) == "torch"
    assert model.trainer.global_step == 2
