"""The NEST model as Lightning trains it: steps, skipped steps, validation, checkpoints, and what is logged.

The loss is the mean over the scored tokens of a whole optimizer step, over all microbatches and ranks: sums are
accumulated, and their count scales the gradients once, when the optimizer steps.
"""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

import nestguard
from nestdata import AudioNoiseBatch
from nestmodel.config import NestConfig
from nestmodel.errors import ConfigError
from nestmodel.formats.model_file import CONFIG_KEY
from nestmodel.formats.weights import WeightParts, build_network, load_weights
from nestmodel.nn.batch_norm import StepBatchNorm
from nestmodel.nn.loss_stats import LossStats, loss_stats
from nestmodel.nn.network import NestNetwork
from nestmodel.training.data import NestDataModule
from nestmodel.training.launcher import destroy_process_group_at_exit
from nestmodel.training.lightning_private import (
    allow_clipping,
    fix_gradient_buckets,
    is_attached,
    log_by_global_step,
    scale_loop_progress,
)
from nestmodel.training.nonfinite import SkippedSteps
from nestmodel.training.resume import Settings, check_same_step, check_unchanged, flatten_settings
from nestmodel.training.schedule import noam_lr
from nestmodel.training.step_stats import StepStats
from nestmodel.training.stop_requests import StopRequests

# The entropy of the tokens of one step is too low, since few of the classes occur in it: counts fade over about this
# many steps instead.
_FADING = 1 - 1 / 200

_SETTINGS_KEY = "nest_settings"
_PROGRESS_KEY = "nest_progress"


class NestModel(NestNetwork, pl.LightningModule):
    """NEST pretraining: a `NestNetwork`, and how it is trained.

    Source: NEST, arXiv:2408.13106.
    """

    def __init__(
        self,
        config: NestConfig,
        init_from: Path | None = None,
        init_parts: WeightParts = "all",
        compile_blocks: bool = False,
    ) -> None:
        """Builds a model with weights drawn from the seed, or read from a file as far as its names and shapes agree.

        Args:
            config: All sizes and settings.
            init_from: A `.nemo` file, a checkpoint of `nestmodel fit`, or a safetensors file to start from.
            init_parts: Whether all weights of that file are taken, or those of the encoder alone.
            compile_blocks: Whether `fit` has torch compile the blocks of the encoder. Best with few shapes of batches:
                see `PlanConfig.num_shapes`.

        Raises:
            WeightsError: The file cannot be read, or nothing in it fits.
        """
        super().__init__(config)
        if init_from is not None:
            report = load_weights(self, init_from, init_parts)
            rank_zero_info(report.summary())
            for setting in report.differing_settings:
                rank_zero_warn(f"{init_from}: {setting}, so its weights may mean something else.")
        self._compiles_blocks = compile_blocks
        self.stop_requests = StopRequests()
        """Requests to end the run early, which all ranks agree on at every optimizer step."""

        self._norms: list[StepBatchNorm] = []
        self._step: StepStats | None = None
        self._skipped = SkippedSteps()
        self._val_tally: Tensor | None = None
        self._faded_counts: Tensor | None = None

    def on_train_batch_start(self, batch: AudioNoiseBatch, batch_idx: int) -> None:  # noqa: ARG002
        """Numbers what is logged by optimizer steps; Lightning's own count is off by one after some checkpoints."""
        log_by_global_step(self.trainer)

    def training_step(self, batch: AudioNoiseBatch, batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning's signature
        """Returns the summed loss of a microbatch; its gradients are divided when the optimizer steps."""
        torch.manual_seed(self.seed_for("dropout", batch))
        tally = loss_stats(self(batch))
        if self._step is None:
            self._step = StepStats(self._norms, self.config.quantizer.num_codebooks)
        self._step.add(tally, batch)
        # Undoes the means that Lightning takes over microbatches and DDP over ranks.
        return tally.nll_sum * self.trainer.accumulate_grad_batches * self.trainer.world_size

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the number of scored tokens of the step, moves batch norm, and logs the step.

        A step whose loss or gradients are no numbers is skipped, on all ranks alike: they look at the same sums.

        Raises:
            TrainingError: Too many steps in a row were skipped, or the data of this rank ended in the midst of one.
        """
        assert self._step is not None
        sums, self._step = self._step, None
        sums.check_whole(self.trainer.accumulate_grad_batches, self.global_rank)
        own = sums.flatten(self.stop_requests)
        totals = sums.unflatten(self._sum_over_ranks(own))
        tally = totals.tally
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in parameters]
        torch._foreach_div_(grads, tally.num_tokens.clamp(min=1))
        norm = torch.nn.utils.get_total_norm(grads)
        # The one point of a step where a GPU is waited for.
        counts = torch.stack([totals.num_broken, totals.num_preempted, totals.num_out_of_time, norm])
        num_broken, num_preempted, num_out_of_time, grad_norm = counts.tolist()
        nestguard.current().beat(nestguard.Phase.OPTIMIZER)
        self.stop_requests.agree(num_preempted, num_out_of_time)
        if num_broken > 0 or not math.isfinite(grad_norm):
            self._skip(sums, parameters)
        else:
            self._skipped.in_a_row = 0
            for module, statistics in zip(self._norms, totals.statistics, strict=True):
                module.update_running_stats(statistics)
            faded = 0.0 if self._faded_counts is None else self._faded_counts.to(self.device)
            self._faded_counts = _FADING * faded + torch.stack([tally.token_counts, tally.predicted_counts])
            self._log_tally("train", tally, self._faded_counts)
            self.log("lr", optimizer.param_groups[0]["lr"], batch_size=1)
            self.log("grad_norm", norm, batch_size=1)
        self.log("steps_skipped", float(self._skipped.total), batch_size=1)

    def _skip(self, sums: StepStats, parameters: list[nn.Parameter]) -> None:
        place = f"step {self.trainer.global_step} is skipped on all ranks; on rank {self.global_rank}"
        has_scaler = self.trainer.precision == "16-mixed"
        self._skipped.skip(f"{place} {sums.nonfinite_sources()}", self.config.optimizer.max_skipped_steps, has_scaler)
        for parameter in parameters:
            parameter.grad = None  # which the optimizer passes over

    def on_train_epoch_end(self) -> None:
        """Checks that the data did not end in the midst of a step, from which no rank would come back.

        Raises:
            TrainingError: They did.
        """
        if self._step is not None and not self.trainer.should_stop:
            self._step.check_whole(self.trainer.accumulate_grad_batches, self.global_rank)

    def validation_step(self, batch: AudioNoiseBatch, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Adds up a microbatch, with masks that are the same at every validation."""
        values = loss_stats(self(batch, mask_purpose="validation mask")).flatten()
        self._val_tally = values if self._val_tally is None else self._val_tally + values

    def on_validation_epoch_end(self) -> None:
        """Logs loss, entropy and accuracy over all microbatches of all ranks."""
        assert self._val_tally is not None
        tally = LossStats.unflatten(self._sum_over_ranks(self._val_tally), self.config.quantizer.num_codebooks)
        self._val_tally = None
        tally.num_tokens.item()  # what a GPU is waited for here belongs to the collective
        nestguard.current().beat(nestguard.Phase.VALIDATION, self.trainer.global_step - 1)
        self._log_tally("val", tally, torch.stack([tally.token_counts, tally.predicted_counts]), prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Returns AdamW under the Noam schedule, one step of it per optimizer step."""
        config = self.config.optimizer
        parameters = [p for p in self.parameters() if p.requires_grad]
        fused = self.device.type in ("cpu", "cuda")  # one pass over weights and moments instead of eight
        optimizer = torch.optim.AdamW(
            parameters, lr=1.0, betas=config.betas, weight_decay=config.weight_decay, fused=fused
        )
        allow_clipping(optimizer)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: noam_lr(step, config, self.config.encoder.d_model)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def setup(self, stage: str) -> None:
        """Checks that the audio comes at the rate that the features are for, and compiles where that is asked for."""
        rate = getattr(getattr(self.trainer, "datamodule", None), "sampling_rate", None)
        if rate not in (None, self.config.features.sampling_rate):
            raise ConfigError(
                f"the corpus is at {rate} Hz and model.config.features.sampling_rate is "
                f"{self.config.features.sampling_rate}. Prepare the corpus with --sampling-rate, or change the model."
            )
        fix_gradient_buckets(self.trainer)
        if self._compiles_blocks and stage == "fit":
            self._compile()

    def on_fit_start(self) -> None:
        """Has batch norm collect the statistics of whole steps."""
        self._norms = [module for module in self.encoder.modules() if isinstance(module, StepBatchNorm)]
        for norm in self._norms:
            norm.start_collecting()

    def on_train_start(self) -> None:
        """Checks that all ranks stand at the same step: each has looked for its checkpoint by itself.

        Raises:
            ConfigError: They do not; on all ranks.
        """
        if self.trainer.world_size > 1:
            check_same_step(self.trainer.global_step, self.global_rank, self.device)

    def teardown(self, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        """Leaves batch norm as torch has it; what comes here has trained to its end."""
        destroy_process_group_at_exit()
        for norm in self._norms:
            norm.stop_collecting()
        self._norms = []

    def _compile(self) -> None:
        dataset = getattr(getattr(self.trainer, "datamodule", None), "train_dataset", None)
        num_shapes = None if dataset is None else dataset.plan.config.num_shapes
        if num_shapes is None:
            rank_zero_warn(
                "compile_blocks without data.plan.num_shapes: batches come in hundreds of shapes, which compiled code "
                "fits less well. Set it, to 8 for example."
            )
        self.encoder.compile_blocks(num_shapes)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Stores the configuration, from which `from_checkpoint` rebuilds the model, and what the run is and saw."""
        checkpoint[CONFIG_KEY] = asdict(self.config)
        checkpoint[_SETTINGS_KEY] = self._run_settings()
        checkpoint[_PROGRESS_KEY] = {**vars(self._skipped), "faded_counts": self._faded_counts}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on only with the data and settings of the checkpoint, on any number of ranks.

        Raises:
            ConfigError: Data or settings are others.
        """
        if not is_attached(self) or self.trainer.state.fn != TrainerFn.FITTING:
            return
        if _SETTINGS_KEY in checkpoint:
            check_unchanged(checkpoint[_SETTINGS_KEY], self._run_settings())
        scale_loop_progress(checkpoint, self.trainer.accumulate_grad_batches)
        if progress := dict(checkpoint.get(_PROGRESS_KEY, {})):
            self._faded_counts = progress.pop("faded_counts")
            self._skipped = SkippedSteps(**progress)

    def _run_settings(self) -> Settings:
        trainer, data = self.trainer, getattr(self.trainer, "datamodule", None)
        return {
            **flatten_settings(self.config, "model.config"),
            **(data.settings if isinstance(data, NestDataModule) else {}),
            "trainer.gradient_clip_val": repr(trainer.gradient_clip_val),
            "trainer.precision": repr(trainer.precision),
        }

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> "NestModel":
        """Rebuilds a model, weights included, from one file: a checkpoint of `nestmodel fit`, NeMo's, or safetensors.

        Raises:
            WeightsError: The file cannot be read, or does not hold a whole model.
        """
        return build_network(cls, path)

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        """Of which a GPU may still be waited for when this returns."""
        nestguard.current().beat_collective(self.trainer.global_step)
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def _log_tally(self, stage: str, tally: LossStats, counts: Tensor, *, prog_bar: bool = False) -> None:
        figures = tally.metrics(counts)
        self.log(f"{stage}_loss", figures.pop("loss"), prog_bar=True, batch_size=1)
        self.log(f"{stage}_token_entropy", figures.pop("token_entropy"), prog_bar=prog_bar, batch_size=1)
        self.log_dict({f"{stage}_{name}": value for name, value in figures.items()}, batch_size=1)
