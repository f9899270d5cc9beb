"""`NestModel`, the NEST network as a LightningModule.

It connects the network to optimizer steps, validation, logging and checkpoints. Its hooks stand in the order in which
Lightning calls them; gradient sums, statistics of a step and the checks of a resume are objects of their own.

The loss is the mean over the scored tokens of a whole optimizer step, over all microbatches and ranks: sums are
accumulated, and the gradients are divided by the number of tokens once, before the optimizer steps.
"""

import math
import random
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import GradClipAlgorithmType, rank_zero_info, rank_zero_warn
from torch import Tensor

import nestguard
from nestdata import AudioNoiseBatch
from nestmodel.attention_context import context_name
from nestmodel.config import BackendName, NestConfig, WeightParts
from nestmodel.errors import ConfigError, TrainingError, WeightsError
from nestmodel.formats.safetensors import CONFIG_KEY, RECORD_KEY, SETTINGS_KEY
from nestmodel.formats.weights import WeightReport, compare_weights, load_network, load_weights
from nestmodel.nn.backend import choose_backend, naming_backend
from nestmodel.nn.batch_norm import StepBatchNorm, update_running_stats
from nestmodel.nn.encoder import ConformerEncoder
from nestmodel.nn.encoder_base import Encoder
from nestmodel.nn.loss import CONTEXT_METRICS, LossStats, loss_stats
from nestmodel.nn.network import NestNetwork
from nestmodel.nn.network_input import NetworkInput
from nestmodel.training.data import NestDataModule
from nestmodel.training.launcher import destroy_process_group_at_exit
from nestmodel.training.lightning_private import (
    fix_gradient_buckets,
    leave_finished_epoch,
    log_by_global_step,
    scale_loop_progress,
    set_global_step,
)
from nestmodel.training.pace import MIN_FACTOR, PHASES, WINDOW, Pace, SlowRanks, by_time
from nestmodel.training.resume_checks import Settings, check_same_step, check_unchanged, run_settings
from nestmodel.training.schedule import build_optimizer, divide_and_clip
from nestmodel.training.step_stats import GradientSums, SkippedSteps, StepStats, StopRequests, add_decayed, fetch

_PROGRESS_KEY = "nest_progress"

_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "32", "bf16", "16")
"""Precisions with weights in float32; the last three are older names of the first three."""


class NestModel(NestNetwork, pl.LightningModule):
    """NEST pretraining: a `NestNetwork` and its training loop hooks.

    Source: NEST, arXiv:2408.13106.
    """

    def __init__(
        self,
        config: NestConfig,
        init_from: Path | None = None,
        init_parts: WeightParts = "all",
        backend: BackendName = "auto",
        encoder: Encoder | None = None,
    ) -> None:
        """Builds a model with weights that are drawn from the seed or loaded from a file.

        Args:
            config: All sizes and settings.
            init_from: A file to start from, or a folder for Hugging Face; see `load_weights`.
            init_parts: Whether to load all weights of that file, or only the weights of the encoder.
            backend: What computes a training step in `fit`. `auto`: on a GPU, kernels of this package, and compiled
                features and blocks; on a CPU, operations of PyTorch. `torch`: operations of PyTorch on both.
            encoder: An encoder of another author, with its weights, in place of the one that `config` describes.

        Raises:
            WeightsError: The file cannot be read, or not all of these weights are in it in the same shapes.
            ConfigError: `init_from` is a name on the hub, and the extra `hub` is not installed.
        """
        super().__init__(config, encoder)
        if init_from is not None:
            report = self.load_all(init_from, init_parts)
            rank_zero_info(report.summary())
            for setting in report.differing_settings:
                rank_zero_warn(f"{init_from}: {setting}, so its weights may have another meaning.")
        self.backend_name = backend
        """What computes a training step, as given."""
        self.stop_requests = StopRequests()
        """Requests to end the run early, on which all ranks agree at every optimizer step."""

        self.worst_data_wait: float | None = None
        """Largest share of their time that one of several ranks has waited for data, in the last window of steps."""

        self._norms: list[StepBatchNorm] = []
        self._gradient_sums = GradientSums([])
        self._pace, self._slow_ranks = Pace(None), SlowRanks()
        self._step: StepStats | None = None
        self._skipped = SkippedSteps()
        self._val_stats: Tensor | None = None
        self._train_counts: Tensor | None = None
        self._record = {} if init_from is None else {"started with the weights of": init_from.name}

    def load_all(self, path: Path, parts: WeightParts = "all") -> WeightReport:
        """Loads all weights of the model, or of its encoder, from a file; see `load_weights`.

        Raises:
            WeightsError: The file cannot be read, or not all of these weights are in it in the same shapes.
        """
        report = load_weights(self, path, parts)
        if report.missing or report.mismatched:
            raise WeightsError(
                f"{report.summary()}. Give a model of the same sizes, or load the parts that fit, by "
                "--model.init-parts encoder."
                if parts == "all"
                else f"{report.summary()}. Give an encoder of the same sizes."
            )
        return report

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # the configuration in the file decides the rest
        cls,
        checkpoint_path: str | Path,
        map_location: torch.device | str | None = None,
        *,
        encoder: Encoder | None = None,
    ) -> "NestModel":
        """Returns the model of a checkpoint, in train mode, as other modules of Lightning do.

        `load_network` returns it without the hooks of training and in eval mode.

        Args:
            checkpoint_path: Any file that `load_network` reads.
            map_location: The device of the result; by default the CPU.
            encoder: As for `load_network`.

        Raises:
            WeightsError: The file cannot be read, or does not hold a whole model.
        """
        network = load_network(checkpoint_path, encoder=encoder)
        model = cls(network.config, encoder=encoder)
        model.load_state_dict(network.state_dict())
        return model if map_location is None else model.to(map_location)

    @property
    def data(self) -> NestDataModule | None:
        """The data module of the trainer; None if a program trains on batches of its own loaders."""
        data = cast(Any, self.trainer).datamodule
        return data if isinstance(data, NestDataModule) else None

    @property
    def is_skipping(self) -> bool:
        """Whether the last step was skipped, because loss or gradient was not finite."""
        return self._skipped.in_a_row > 0

    def setup(self, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        """Checks the precision and the sampling rate of the corpus, and fixes DDP's gradient buckets.

        Raises:
            ConfigError: The precision is not supported, or the corpus has another sampling rate than the features.
        """
        check_precision(self.trainer.precision)
        if self.data is not None:
            check_sampling_rate(self.config, self.data.sampling_rate)
        # Lightning warns because the hook is one of this model and not of its data module, which is intended.
        warnings.filterwarnings("ignore", message="You have overridden `on_before_batch_transfer` in `LightningModule`")
        fix_gradient_buckets(self.trainer)

    def configure_optimizers(self) -> Any:
        """Returns AdamW with its schedule, which advances once per optimizer step."""
        trained = (p for p in self.parameters() if p.requires_grad)
        num_steps = self.trainer.max_steps
        return build_optimizer(trained, self.config.optimizer, self.encoder.dim, self.device, num_steps)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Validates that data and settings match the checkpoint, and converts its progress to the number of ranks.

        A validation takes only the number of the checkpoint's step, under which it is reported.

        Raises:
            ConfigError: Data or settings differ.
            WeightsError: The weights have other shapes.
        """
        is_fit = self.trainer.state.fn == TrainerFn.FITTING
        if is_fit and SETTINGS_KEY in checkpoint:
            check_unchanged(checkpoint[SETTINGS_KEY], self._run_settings(), step=checkpoint["global_step"])
        report = compare_weights(self.state_dict(), checkpoint["state_dict"], Path("the checkpoint"))
        if report.missing or report.mismatched:
            raise WeightsError(f"{report.summary()}. Give the encoder that it was trained with.")
        if not is_fit:
            set_global_step(self.trainer, checkpoint["global_step"])
            return
        self._record = dict(checkpoint.get(RECORD_KEY, self._record))
        leave_finished_epoch(checkpoint)
        scale_loop_progress(checkpoint, self.trainer.accumulate_grad_batches)
        if progress := dict(checkpoint.get(_PROGRESS_KEY, {})):
            self._train_counts = progress.pop("faded_counts")
            self._skipped = SkippedSteps(**progress)

    def on_fit_start(self) -> None:
        """Sets the backend of the run, and prepares optimizer steps."""
        plan = None if self.data is None else self.data.plan
        num_shapes, shapes = (None, []) if plan is None else (plan.config.num_shapes, plan.shapes)
        device, precision = self.trainer.strategy.root_device, self.trainer.precision
        self.use_backend(choose_backend(self.backend_name, self.config, device, precision, num_shapes, shapes))
        self.prepare_steps()

    def prepare_steps(self) -> None:
        """Makes batch norm collect the statistics of whole optimizer steps, and gradients be summed over steps."""
        self._norms = [module for module in self.encoder.modules() if isinstance(module, StepBatchNorm)]
        for norm in self._norms:
            norm.start_collecting()
        self._pace, self._slow_ranks = Pace(self.device if self.trainer.world_size > 1 else None), SlowRanks()
        self._gradient_sums = GradientSums(parameter for parameter in self.parameters() if parameter.requires_grad)

    def on_train_start(self) -> None:
        """Checks that all ranks start at the same optimizer step.

        Raises:
            ConfigError: The steps differ; raised on all ranks.
        """
        if self.trainer.world_size > 1:
            check_same_step(self.trainer.global_step, self.global_rank, self.device)

    def on_before_batch_transfer(
        self,
        batch: AudioNoiseBatch | NetworkInput,
        dataloader_idx: int,  # noqa: ARG002 - Lightning's signature
    ) -> NetworkInput:
        """Draws the masks of a microbatch, the same ones in every validation, and copies both to the device."""
        if isinstance(batch, NetworkInput):
            return batch  # `CopyAhead` has done so
        if self.trainer.training:
            return self.training_input(batch)
        masks = self.draw_masks(batch, mask_purpose="validation mask")
        return NetworkInput.of(batch, masks, self.device)

    def training_input(self, batch: AudioNoiseBatch) -> NetworkInput:
        """Draws the masks of a microbatch of training, and copies both to the device."""
        return NetworkInput.of(batch, self.draw_masks(batch), self.device)

    def on_train_batch_start(self, batch: NetworkInput, batch_idx: int) -> None:  # noqa: ARG002
        """Numbers logged metrics by optimizer step; see `log_by_global_step`."""
        log_by_global_step(self.trainer)

    def training_step(self, batch: NetworkInput, batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning's signature
        """Returns the summed loss of a microbatch; `on_before_optimizer_step` divides its gradients."""
        self._pace.begin_forward()
        if self._step is None:
            self._step = StepStats(self._norms, self.config.quantizer.num_codebooks)
        seed_generators(self, batch)
        with naming_backend(self.backend):
            stats = loss_stats(self.forward_masked(batch))
        self._step.add(stats, batch)
        # Compensates for the means that Lightning takes over microbatches and DDP takes over ranks.
        return stats.nll_sum * self.trainer.accumulate_grad_batches * self.trainer.world_size

    def on_before_backward(self, loss: Tensor) -> None:
        """Sets the gradients of earlier microbatches aside, unless DDP is about to add to them."""
        assert self._step is not None
        is_last = self._step.num_microbatches == self.trainer.accumulate_grad_batches
        if self.trainer.world_size == 1 or not is_last:
            self._gradient_sums.set_aside()
        self._pace.begin_backward(loss)

    def on_after_backward(self) -> None:
        """Adds the gradients of the microbatch to the sums of earlier microbatches."""
        self._gradient_sums.add()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the number of scored tokens of the step, clips them, and logs the step.

        It also updates the statistics of batch norm.

        A step with a non-finite loss or gradient is skipped on all ranks, because they decide by the same sums.

        Raises:
            TrainingError: Too many consecutive steps were skipped, the data of this rank ended within the step, or no
                gradient reaches the encoder.
        """
        assert self._step is not None
        step, self._step = self._step, None
        self._check_gradients()
        step.check_complete(self.trainer.accumulate_grad_batches, self.global_rank)
        stats, totals, norm_statistics = step.unflatten(self._sum_over_ranks(step.flatten(self.stop_requests)))
        class_counts = add_decayed(self._train_counts, stats)
        norm = self._divide_and_clip(optimizer, stats.num_tokens.clamp(min=1))
        # The only point of a step at which the CPU waits for the GPU, except where ranks are compared.
        on_device = {**totals, "grad_norm": norm}
        metrics = fetch({**on_device, **stats.metrics(class_counts)})
        numbers = {name: float(metrics.pop(name)) for name in on_device}
        self._pace.end_step()
        if self.trainer.world_size > 1 and (self.trainer.global_step + 1) % WINDOW == 0:
            self._compare_ranks()
        nestguard.current().beat(nestguard.Phase.OPTIMIZER)
        self.stop_requests.agree(numbers["num_preempted"], numbers["num_out_of_time"])
        if numbers["num_nonfinite"] > 0 or not math.isfinite(numbers["grad_norm"]):
            self._skip(step, optimizer)
        else:
            self._skipped.in_a_row = 0
            update_running_stats(self._norms, norm_statistics)
            self._train_counts = class_counts
            self._record["last training step"] = _metrics_text(metrics)
            self._log_metrics("train", metrics)
            seconds = numbers["num_samples"] / self.config.features.sampling_rate
            lr = optimizer.param_groups[0]["lr"]
            self.log_numbers({"lr": lr, "train_audio_s": seconds, "grad_norm": numbers["grad_norm"]})
        self.log_numbers({"steps_skipped": self._skipped.total})

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Lets Lightning clip by value; `on_before_optimizer_step` has clipped by norm."""
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_train_batch_end(self, outputs: Any, batch: NetworkInput, batch_idx: int) -> None:  # noqa: ARG002
        """Begins to measure the wait for the next microbatch."""
        self._pace.wait_for_batch()

    def on_train_epoch_end(self) -> None:
        """Checks that the data did not end within a step: the other ranks would wait for the rest of it forever.

        Raises:
            TrainingError: The data of this rank ended within a step.
        """
        if self._step is not None and not self.trainer.should_stop:
            self._step.check_complete(self.trainer.accumulate_grad_batches, self.global_rank)

    def on_validation_start(self) -> None:
        """Leaves the time of a validation out of the time of the next step."""
        self._pace.discard_step()

    def validation_step(self, batch: NetworkInput, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Accumulates the statistics of a microbatch in each attention context of the encoder."""
        with naming_backend(self.backend):
            values = torch.stack([loss_stats(output).flatten() for output in self.forward_contexts(batch)])
        self._val_stats = values if self._val_stats is None else self._val_stats + values

    def on_validation_epoch_end(self) -> None:
        """Logs loss, entropies and accuracy over all microbatches of all ranks.

        Loss and accuracy are also logged for the attention contexts after the first, such as `val_loss_70_13`.
        """
        assert self._val_stats is not None
        sums, self._val_stats = self._sum_over_ranks(self._val_stats), None
        metrics: dict[str, Tensor] = {}
        for number, (context, values) in enumerate(zip(self.config.contexts, sums, strict=True)):
            stats = LossStats.unflatten(values, self.config.quantizer.num_codebooks)
            of_context = stats.metrics(torch.stack([stats.token_counts, stats.predicted_counts]))
            if number == 0 or context is None:
                metrics |= of_context
            else:
                metrics |= {f"{name}_{context_name(context)}": of_context[name] for name in CONTEXT_METRICS}
        # Waits for the GPU before the heartbeat, which until then reports the collective.
        metrics = fetch(metrics)
        nestguard.current().beat(nestguard.Phase.VALIDATION, self.trainer.global_step - 1)
        self._record["last validation"] = f"after step {self.trainer.global_step:,}: {_metrics_text(metrics)}"
        if math.isnan(metrics["loss"]):
            rank_zero_warn(
                "the validation has no loss: none of its frames was masked, in this and in every later validation. "
                "Give a validation corpus of more audio, of at least some minutes."
            )
        self._log_metrics("val", metrics, prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the configuration of the model, the settings of the run, the skipped steps and the class counts."""
        checkpoint[CONFIG_KEY] = asdict(self.config)
        checkpoint[RECORD_KEY] = {**({} if self.data is None else self.data.record), **self._record}
        checkpoint[SETTINGS_KEY] = self._run_settings()
        checkpoint[_PROGRESS_KEY] = {**vars(self._skipped), "faded_counts": self._train_counts}

    def _run_settings(self) -> Settings:
        data = {} if self.data is None else self.data.settings
        return run_settings(self.config, self.backend_name, self.trainer, data)

    def teardown(self, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        """Ends the collection of batch-norm statistics, and registers the process group for destruction at exit.

        Lightning does not call it after an error.
        """
        destroy_process_group_at_exit()
        for norm in self._norms:
            norm.stop_collecting()
        self._norms = []

    def discard_step(self) -> None:
        """Drops the statistics of a step that will not be completed."""
        self._step = None

    def log_numbers(self, numbers: Mapping[str, float | int]) -> None:
        """Logs numbers from the CPU, on which they stay: `log` would copy each to the GPU and wait for it twice."""
        values = {name: torch.tensor(number, dtype=torch.float32) for name, number in numbers.items()}
        self.log_dict(values, batch_size=1)

    def _check_gradients(self) -> None:
        """Raises TrainingError if no gradient reaches the encoder."""
        # If the encoder has gradients, the search usually ends at its first parameter.
        parameters = self.encoder.parameters
        if all(each.grad is None for each in parameters()) and any(each.requires_grad for each in parameters()):
            raise TrainingError(
                f"no gradient reaches the encoder {type(self.encoder).__name__}: its output is detached, or computed "
                "without gradients. Look for `detach` and `no_grad` in it."
            )

    def _divide_and_clip(self, optimizer: torch.optim.Optimizer, num_tokens: Tensor) -> Tensor:
        """Divides the gradients by the number of scored tokens, clips them by norm, and returns the norm before."""
        limit = self.trainer.gradient_clip_val or 0.0
        is_clipped = limit > 0  # Lightning does not clip to a negative limit
        is_by_value = is_clipped and self.trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
        max_norm = limit if is_clipped and not is_by_value else None
        # Lightning clips by value, after the division; in 16-mixed, `grad_scale` belongs to the scaler.
        is_last_change = not is_by_value and self.trainer.precision != "16-mixed"
        return divide_and_clip(optimizer, num_tokens, max_norm, is_last_change=is_last_change)

    def _skip(self, step: StepStats, optimizer: torch.optim.Optimizer) -> None:
        what = f"step {self.trainer.global_step} is skipped on all ranks; on rank {self.global_rank}"
        has_scaler = self.trainer.precision == "16-mixed"
        self._skipped.skip(f"{what} {step.nonfinite_sources()}", self.config.optimizer.max_skipped_steps, has_scaler)
        optimizer.zero_grad()  # to None: the optimizer ignores parameters without a gradient

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sums over all ranks in place; CUDA work may still be in flight."""
        nestguard.current().beat_collective(self.trainer.global_step)
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def _compare_ranks(self) -> None:
        """Exchanges the times of all ranks, and names a rank that holds up the others."""
        seconds = torch.zeros(self.trainer.world_size, len(PHASES), device=self.device)
        seconds[self.global_rank] = torch.tensor(self._pace.take_means(), device=self.device)
        torch.distributed.all_reduce(seconds)  # within the collective of the step, which the heartbeat reports
        ranks = by_time(seconds)
        if ranks:
            self.log_numbers({"slowest_rank": ranks[0].rank, "slowest_rank_factor": ranks[0].factor})
            self.worst_data_wait = float((seconds[:, 0] / seconds.sum(1)).max())
        own = next((one for one in ranks if one.rank == self.global_rank), None)
        if own is not None and own.factor <= MIN_FACTOR:
            nestguard.current().describe("")
        for slow in self._slow_ranks.newly_slow(ranks):
            rank_zero_warn(f"Rank {slow.rank} (node {slow.rank // self.trainer.num_devices}) {slow}.")
            if slow.rank == self.global_rank:
                nestguard.current().describe(str(slow))

    def _log_metrics(self, stage: str, metrics: dict[str, Tensor], *, prog_bar: bool = False) -> None:
        """Logs metrics that are on the CPU, so that Lightning's reads of their values do not wait for the GPU."""
        self.log(f"{stage}_loss", metrics.pop("loss"), prog_bar=True, batch_size=1)
        self.log(f"{stage}_token_entropy", metrics.pop("token_entropy"), prog_bar=prog_bar, batch_size=1)
        self.log_dict({f"{stage}_{name}": value for name, value in metrics.items()}, batch_size=1)


def seed_generators(network: NestNetwork, batch: NetworkInput) -> None:
    """Seeds torch's generators, from which dither and some dropout are drawn, for a microbatch.

    Only the generators of the CPU and of the current GPU are seeded; `torch.manual_seed` would seed all visible GPUs.
    Encoders of other authors may draw from the generators of NumPy and Python as well.
    """
    seed = network.seed_for("dropout", batch)
    torch.default_generator.manual_seed(seed)
    if not isinstance(network.encoder, ConformerEncoder):
        random.seed(seed)
        np.random.seed(seed % 2**32)
    if batch.audio.device.type == "cuda":
        torch.cuda.manual_seed(seed)


def check_precision(precision: str | int | None) -> None:
    """Raises ConfigError if a precision of Lightning changes the type of the weights; None is Lightning's default."""
    if precision is not None and str(precision) not in _PRECISIONS:
        raise ConfigError(
            f"trainer.precision is {precision}, which trains with weights of another type than float32. Set it to "
            "bf16-mixed or 16-mixed, which compute in 16 bits with weights in float32, or to 32-true."
        )


def check_sampling_rate(config: NestConfig, rate: int) -> None:
    """Raises ConfigError if the corpus has another sampling rate than the features."""
    if rate != config.features.sampling_rate:
        raise ConfigError(
            f"the corpus is at {rate} Hz and model.config.features.sampling_rate is {config.features.sampling_rate}. "
            "Prepare the corpus with --sampling-rate, or change the model."
        )


def _metrics_text(metrics: Mapping[str, Tensor]) -> str:
    """Returns what a model card says about a step."""
    loss, entropy, accuracy = (float(metrics[name]) for name in ("loss", "token_entropy", "accuracy"))
    return f"loss {loss:.4g} nats, token entropy {entropy:.4g} nats, masked accuracy {accuracy:.4g}"
