"""Trials: optimizer steps of a second model on noise, which show whether shapes fit into memory, and their speed.

The check `step` runs one in the process of each rank, the search for a batch budget many in a child process.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import pytorch_lightning as pl
import torch

from nestdata import AudioNoiseBatch, BatchPlan, MicrobatchKey, Mix, PlanConfig
from nestmodel.config import BackendName, NestConfig
from nestmodel.errors import TrainingError, is_out_of_memory
from nestmodel.nn.backend import TORCH, Backend, choose_backend
from nestmodel.preflight.memory import PeakMemory
from nestmodel.training.module import NestModel

Shape = tuple[int, int]
"""Number of cuts in a microbatch, and number of samples to which each cut is padded."""


def largest_shapes(plan: BatchPlan) -> list[Shape]:
    """Returns the shapes of a plan with the most samples, with the longest cuts, and with the most cuts."""
    shapes = plan.shapes
    most_samples = max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
    longest_cuts = max(shapes, key=lambda shape: (shape[1], shape[0]))
    return list(dict.fromkeys([most_samples, longest_cuts, max(shapes)]))


def describe_shapes(shapes: Sequence[Shape], sampling_rate: int) -> str:
    """Returns shapes as text, such as `12 x 20.0 s and 240 x 1.0 s`."""
    return " and ".join(f"{cuts} x {samples / sampling_rate:.1f} s" for cuts, samples in shapes)


class TrialStep:
    """Runs optimizer steps on a second model with the precision and the device of a trainer.

    Gradients are kept from step to step, as a run keeps them from microbatch to microbatch. The first step of a shape
    also allocates the moments of the optimizer, and compiles.

    Args:
        config: Sizes and settings of the model.
        trainer: The trainer, configured as for the run.
        backend: What computes the step.
    """

    def __init__(self, config: NestConfig, trainer: pl.Trainer, *, backend: Backend = TORCH) -> None:
        self._device, self._precision = trainer.strategy.root_device, trainer.precision_plugin
        # The schedule of the run may need its last step, which a trial does not have.
        config = replace(config, optimizer=replace(config.optimizer, schedule="noam"))
        model = cast(NestModel, self._precision.convert_module(NestModel(config)))
        self._model = model.to(self._device).train()
        self._model.trainer = trainer
        self._model.use_backend(backend)
        self._model.prepare_steps()
        self._optimizer = self._model.configure_optimizers()["optimizer"]
        self.num_trained = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        """Number of trained parameters."""

    def __call__(self, batch: AudioNoiseBatch) -> float:
        """Runs one step and returns its seconds. The batch is first brought into the form that a run's loader yields.

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
        self._optimizer.step()
        self._model.discard_step()
        if not loss.isfinite():
            raise TrainingError("the loss is not finite. Check trainer.precision.")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - before


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
        key=MicrobatchKey(0, 0),
    )


def trial_step_of(
    config: NestConfig, name: BackendName, trainer: pl.Trainer, plan: PlanConfig, shapes: Sequence[Shape]
) -> TrialStep:
    """Returns the trial step of a run with these settings and shapes, by the backend of the run."""
    device = trainer.strategy.root_device
    backend = choose_backend(name, config, device, trainer.precision, plan.num_shapes, shapes)
    return TrialStep(config, trainer, backend=backend)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult:
    """The outcome of a trial."""

    too_large: Shape | None
    """The shape whose step does not fit into memory; None if all steps fit."""

    peak_bytes: int
    """Peak memory; 0 if the trial does not fit."""

    allowed_bytes: int
    """Memory that the steps were allowed to use: the limit without the margin; 0 if there was no limit."""

    seconds: tuple[float, ...]
    """Seconds of the second step of each shape, in the order of the shapes; fewer if one did not fit."""

    error: str = ""
    """Message of the allocation that failed, if this process made it."""


def run_shapes(
    make_step: Callable[[], TrialStep],
    shapes: Sequence[Shape],
    *,
    device: torch.device,
    allowed_bytes: int,
    with_ddp: bool,
    on_step: Callable[[], None] = lambda: None,
) -> TrialResult:
    """Runs two optimizer steps of each shape, in order, until one of them does not fit.

    The first step of a shape allocates moments and gradients, and compiles; the second one needs them besides its
    activations.

    Args:
        make_step: Builds the model, whose memory is part of the peak memory.
        shapes: The shapes, at least one.
        device: The device of the steps.
        allowed_bytes: Peak memory above which a shape does not fit; 0 if only a failed allocation counts.
        with_ddp: Whether DDP's copy of the gradients is in memory.
        on_step: Called after each step.
    """
    memory, seconds = PeakMemory(device), list[float]()

    def result(too_large: Shape | None, error: str = "") -> TrialResult:
        peak = 0 if too_large else memory.peak_bytes()
        return TrialResult(
            too_large=too_large, peak_bytes=peak, allowed_bytes=allowed_bytes, seconds=tuple(seconds), error=error
        )

    try:
        step = make_step()
        copy = torch.ones(step.num_trained if with_ddp else 0, device=device)
        for shape in shapes:
            for _ in range(2):
                last_s = step(noise_batch(shape))
                on_step()
            if allowed_bytes and memory.peak_bytes() > allowed_bytes:
                return result(shape)
            seconds.append(last_s)
        del copy
        return result(None)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The message only, because the traceback of the error keeps all tensors alive.
        return result(shapes[len(seconds)], str(error) or type(error).__name__)


@contextmanager
def clean_up(device: torch.device) -> Iterator[None]:
    """Restores torch's random state at the end, and frees unused memory."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
