"""Optimizer steps of a second model, to measure their time and memory without changing the model of the run."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import pytorch_lightning as pl
import torch

from nestdata import AudioNoiseBatch, MicrobatchKey, Mix, PlanConfig
from nestmodel.config import NestConfig
from nestmodel.errors import TrainingError
from nestmodel.nn.gpu.forms import PLAIN, Forms, Kernels
from nestmodel.nn.gpu.step_graph import Capture, CudaCapture
from nestmodel.training.data import NestDataModule
from nestmodel.training.module import NestModel
from nestmodel.training.starting.run_form import run_form

Shape = tuple[int, int]
"""Number of cuts in a microbatch, and number of samples to which each cut is padded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step of one microbatch."""

    microbatch_s: float
    """Masks, transfer to the device, forward and backward pass."""

    optimizer_s: float

    host_s: float = 0.0
    """Part of `microbatch_s` until the CPU had launched everything; the rest is waiting for the device."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return self.microbatch_s + self.optimizer_s

    def seconds_per_microbatch(self, microbatches_per_rank: int) -> float:
        """Returns the seconds of a microbatch in a step of several, which share one optimizer update."""
        return self.microbatch_s + self.optimizer_s / microbatches_per_rank


class TrialStep:
    """Runs optimizer steps on a second model with the precision and the device of a trainer.

    Gradients are kept from step to step, as a run keeps them from microbatch to microbatch. The first step of a shape
    also allocates the moments of the optimizer, and compiles the form.

    Args:
        config: Sizes and settings of the model.
        trainer: The trainer, configured as for the run.
        forms: The form of the step. The first step compares it with the plain form.
        capture: Captures microbatches as graphs: the first step of a shape warms up, and the second one captures it.
            None for no graphs.
        num_shapes: Number of shapes of which graphs are captured.
    """

    def __init__(
        self,
        config: NestConfig,
        trainer: pl.Trainer,
        *,
        forms: Forms = PLAIN,
        capture: Capture | None = None,
        num_shapes: int = 1,
    ) -> None:
        self._device, self._precision = trainer.strategy.root_device, trainer.precision_plugin
        model = cast(NestModel, self._precision.convert_module(NestModel(config)))
        self._model = model.to(self._device).train()
        self._model.trainer = trainer
        self._model.use_checked_forms(forms)
        self._model.use_graphs(num_shapes, capture)
        self._model.prepare_steps()
        self._optimizer = self._model.configure_optimizers()["optimizer"]
        self.num_trained = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        """Number of trained parameters."""

    def __call__(self, batch: AudioNoiseBatch) -> StepTime:
        """Runs one step. The batch is first brought into the form in which the loader of a run yields it.

        Raises:
            TrainingError: The loss is not finite.
        """
        if self._device.type == "cuda":
            batch = batch.pin_memory()
        before = time.perf_counter()
        inputs = self._model.training_input(batch)
        with self._precision.train_step_context():
            loss = self._model.training_step(inputs, 0)
        self._model.on_before_backward(loss)
        self._model.backward(loss)
        self._model.on_after_backward()
        host_s = time.perf_counter() - before
        is_finite = bool(loss.isfinite())
        self._wait()
        between = time.perf_counter()
        self._optimizer.step()
        self._model.discard_step()
        self._wait()
        if not is_finite:
            raise TrainingError("the loss is not finite. Check trainer.precision.")
        return StepTime(microbatch_s=between - before, optimizer_s=time.perf_counter() - between, host_s=host_s)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def noise_batch(shape: Shape) -> AudioNoiseBatch:
    """Returns a microbatch of white noise with interference everywhere and no padding, the same for each call."""
    num_cuts, num_samples = shape
    generator = torch.Generator().manual_seed(0)
    lens = torch.full((num_cuts,), num_samples)
    audio = torch.randint(-4000, 4000, shape, dtype=torch.int16, generator=generator) / 32768
    noise = 0.05 * torch.randn(shape, generator=generator)
    return AudioNoiseBatch(
        audio=audio,
        audio_len=lens,
        noise=noise,
        noise_len=lens.clone(),
        noisy_audio=audio + noise,
        noisy_audio_len=lens.clone(),
        sample_id=["noise"] * num_cuts,
        mixes=[Mix(mode="none")] * num_cuts,
        bad_cuts=[],
        key=MicrobatchKey(0, 0, 0),
    )


def make_trial_step(model: NestModel, data: NestDataModule, trainer: pl.Trainer) -> TrialStep:
    """Returns a function that runs optimizer steps of a second model with the settings and in the form of a run."""
    return trial_step_of(model.config, model.kernels, trainer, data.train_dataset.plan.config)


def trial_step_of(config: NestConfig, kernels: Kernels, trainer: pl.Trainer, plan: PlanConfig) -> TrialStep:
    """Returns the trial step of a run with these settings."""
    form = run_form(config, kernels, trainer, plan)
    capture = None if form.why_no_graphs else CudaCapture()
    return TrialStep(config, trainer, forms=form.forms, capture=capture, num_shapes=form.forms.num_shapes or 1)


@contextmanager
def clean_up(device: torch.device) -> Iterator[None]:
    """Restores torch's random state at the end, and frees unused memory."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
