"""Microbatches and optimizer steps as a run makes them on one GPU, in one backend after another."""

import gc
from dataclasses import replace
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import yaml
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor

from nestmodel import EncoderConfig, MaskConfig, NestConfig, NestModel, OptimizerConfig, QuantizerConfig, preset_path
from nestmodel.nn.backend import Backend
from nestmodel.preflight.trial import noise_batch

REFERENCE = "torch"
"""The backend with operations of torch only."""

KERNELS = "kernels"

BACKENDS = {
    "compiled": Backend(kernels=True, keeps_subsampling=True, compiled=True),
    KERNELS: Backend(kernels=True, keeps_subsampling=True, compiled=False),
    "compiled-fixed": Backend(kernels=True, keeps_subsampling=True, compiled=True, num_shapes=1),
    REFERENCE: Backend(kernels=False, compiled=False),
}
"""The backends that are compared, the most important ones first; all compute the same, up to rounding. The code of
`compiled-fixed` is compiled for the one shape that is measured."""

CUT_S = 15
RATE = 16000
Precision = Literal["bf16-mixed", "32-true"]


def config_of(preset: str, device: torch.device) -> NestConfig:
    """Returns the model of a preset; on a CPU, a tiny one."""
    if device.type == "cuda":
        return NestConfig.preset(preset)
    return NestConfig(
        encoder=EncoderConfig(d_model=16, num_heads=2, num_layers=2, subsampling_channels=8),
        quantizer=QuantizerConfig(num_classes=32),
        masking=MaskConfig(prob=0.05),
        optimizer=OptimizerConfig(lr=1.0, warmup_steps=10),
    )


def cuts_of(preset: str, device: torch.device) -> int:
    """Returns the number of cuts in a microbatch of a preset."""
    if device.type != "cuda":
        return 2
    content = yaml.safe_load(preset_path(preset).read_text(encoding="utf-8"))
    return int(content["data"]["plan"]["max_batch_seconds"] // CUT_S)


def batch_of(num_cuts: int, device: torch.device, share: float = 1.0) -> Any:
    """Returns a microbatch of noise with padding in its last cut, in page-locked memory for a GPU.

    Args:
        num_cuts: Number of cuts.
        device: Device on which it will be used.
        share: Length of the cuts relative to `CUT_S`; a CPU gets cuts of 2 s.
    """
    seconds = CUT_S if device.type == "cuda" else 2
    batch = noise_batch((num_cuts, int(share * seconds * RATE)))
    lens = batch.audio_len.clone()
    lens[-1] = 3 * lens[-1] // 4
    batch = replace(batch, audio_len=lens)
    return batch.pin_memory() if device.type == "cuda" else batch


class _Model(NestModel):
    """A model whose metrics are computed but not logged, because no training loop collects them."""

    def log(self, *_: Any, **__: Any) -> None:
        """Does nothing."""

    def log_dict(self, *_: Any, **__: Any) -> None:
        """Does nothing."""


class Trial:
    """A model with its optimizer, without a training loop.

    Args:
        config: Sizes and settings.
        device: GPU or CPU.
        precision: Precision of the trainer.
        per_step: Number of microbatches in an optimizer step.
    """

    def __init__(
        self, config: NestConfig, device: torch.device, *, precision: Precision = "bf16-mixed", per_step: int = 1
    ) -> None:
        self.device, self.per_step = device, per_step
        self.trainer = pl.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision=precision,
            gradient_clip_val=1.0,  # as in the presets
            accumulate_grad_batches=per_step,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[LightningEnvironment()],
        )
        self.model = _Model(config).to(device).train()
        self.model.trainer = self.trainer
        self._optimizer = self.model.configure_optimizers()["optimizer"]

    def use(self, name: str, shorter: Any = None) -> None:
        """Switches to a backend; if its code is compiled for varying shapes, runs a shorter microbatch first."""
        torch.compiler.reset()
        self.model.use_backend(BACKENDS[name])
        self.model.prepare_steps()
        self.reset()
        free(self.device)
        if shorter is not None and BACKENDS[name].compiled and BACKENDS[name].num_shapes is None:
            self.microbatch(shorter)
            self.reset()

    def microbatch(self, batch: Any) -> Tensor:
        """Runs forward and backward pass, which adds to the gradients; returns the loss, summed over scored tokens."""
        inputs = self.model.training_input(batch)
        with self.trainer.precision_plugin.train_step_context():
            loss = self.model.training_step(inputs, 0)
        self.model.on_before_backward(loss)
        self.model.backward(loss)
        self.model.on_after_backward()
        return loss.detach()

    def step(self, batch: Any) -> None:
        """Makes an optimizer step, with its one wait."""
        for _ in range(self.per_step):
            self.microbatch(batch)
        self.model.on_before_optimizer_step(self._optimizer)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def reset(self) -> None:
        """Drops the gradients and statistics of a step that is not completed."""
        self.model.discard_step()
        self._optimizer.zero_grad()

    def wait(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def free(device: torch.device) -> None:
    """Returns memory that no tensor uses to the GPU, and starts a new count of the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
