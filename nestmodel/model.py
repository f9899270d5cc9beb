"""The NEST model: a Lightning module that only wires plain modules together, feeds them keyed randomness, and logs.

Everything random in a training step is keyed by (seed, step, microbatch), so there is no generator state to save. The
loss is the mean over the scored tokens of a whole optimizer step, over all microbatches and ranks: sums are
accumulated, and their count scales the gradients once, when the optimizer steps.
"""

import math
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
from jaxtyping import Bool, Float, Int
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

import nestguard
from nestdata import AudioNoiseBatch, derive_key
from nestmodel.batch_norm import StepBatchNorm
from nestmodel.config import NestConfig
from nestmodel.data import NestDataModule
from nestmodel.decoder import MultiSoftmaxDecoder
from nestmodel.encoder import ConformerEncoder
from nestmodel.errors import ConfigError, TrainingError
from nestmodel.features import Preprocessor
from nestmodel.launch import part_at_exit
from nestmodel.loss import masked_nll
from nestmodel.masking import BlockMask, counted_tokens
from nestmodel.metrics import token_counts, token_entropy
from nestmodel.quantizer import RandomProjectionQuantizer
from nestmodel.resume import Settings, check_unchanged, flatten_settings, scale_progress
from nestmodel.schedule import noam_lr
from nestmodel.tally import StepSums, Tally
from nestmodel.weights import CONFIG_KEY, WeightParts, load_weights, load_whole, read_config, unlike_settings

# The entropy of the tokens of one step is too low, since few of the classes occur in it: counts fade over about this
# many steps instead.
_FADING = 1 - 1 / 200

_SETTINGS_KEY = "nest_settings"

_SCALER_STEPS = 24
"""A gradient scaler starts at 2**16 and halves with every step that overflows, until none does."""


class SkippedStepWarning(UserWarning):
    """An optimizer step was not made, since its loss or gradients are no numbers."""


class NestModel(pl.LightningModule):
    """NEST pretraining: read noisy speech with blocks of frames masked, predict tokens of the clean speech.

    The parts are plain modules: `features`, `quantizer`, `mask_processor`, `encoder`, `decoder`. Their names in the
    state dict are those of NeMo's EncDecDenoiseMaskedTokenPredModel.

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
        super().__init__()
        self.config = config
        num_mels, quantizer, dim = config.features.num_mels, config.quantizer, config.encoder.d_model
        is_pre_conv, factor = config.masking.position == "pre_conv", config.encoder.subsampling_factor
        # Masks lie on feature frames, of which as many as an encoder frame covers make a token, or on encoder frames.
        masked_dim, self._num_stacked = (num_mels, factor) if is_pre_conv else (dim, 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_key(config.seed, "weights"))
            self.preprocessor = Preprocessor(config.features)
            self.quantizer = RandomProjectionQuantizer(quantizer, dim=masked_dim, num_stacked=self._num_stacked)
            self.mask_processor = BlockMask(
                config.masking, dim=masked_dim, subsampling_factor=factor // self._num_stacked
            )
            self.encoder = ConformerEncoder(config.encoder, num_mels=num_mels)
            self.decoder = MultiSoftmaxDecoder(
                dim=dim, num_classes=quantizer.num_classes, num_codebooks=quantizer.num_codebooks
            )
        if init_from is not None:
            rank_zero_info(load_weights(self, init_from, init_parts).summary())
            for setting in unlike_settings(config, init_from):
                rank_zero_warn(f"{init_from}: {setting}, so its weights may mean something else.")
        self._compiles_blocks = compile_blocks
        self.is_leaving = False
        """Set where this rank is asked to leave; at the end of a step all ranks know of it."""

        self.has_to_leave = False
        """Whether any rank was asked to leave when the last step was made; the same on all of them."""

        self._norms: list[StepBatchNorm] = []
        self._step: StepSums | None = None
        self._num_skipped = self._num_skipped_in_a_row = 0
        self._val_tally: Tensor | None = None
        self._faded_counts: Tensor | None = None

    @property
    def features(self) -> Preprocessor:
        """Turns (audio, audio_lens) into (feats, feat_lens); NeMo's state dict calls it `preprocessor`."""
        return self.preprocessor

    def predict(
        self, feats: Float[Tensor, "batch mels frames"], feat_lens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch enc_frames classes codebooks"], Int[Tensor, " batch"]]:
        """Returns the log-probabilities of the tokens of features, with nothing masked, and the valid lengths."""
        encoded, enc_lens = self.encoder(feats, feat_lens)
        return self.decoder(encoded), enc_lens

    def tally(
        self,
        clean: Float[Tensor, "batch mels frames"],
        noisy: Float[Tensor, "batch mels frames"],
        feat_lens: Int[Tensor, " batch"],
        is_masked: Bool[Tensor, "batch masked_frames"],
    ) -> Tally:
        """Scores the masked tokens of clean features, as read from noisy ones.

        Args:
            clean: Features of the clean speech, from which the tokens come.
            noisy: Features of the noisy speech, which the encoder reads where it is not masked.
            feat_lens: Valid frames of both.
            is_masked: True where the encoder sees the mask instead; over encoder frames where `masking.position` is
                post_conv, over feature frames elsewhere.
        """
        # The scored rows are looked for before the encoder runs, since a GPU has to be waited for to count them.
        is_scored = counted_tokens(is_masked, self._num_stacked, self.config.masking.threshold)
        rows = is_scored.flatten().nonzero().squeeze(1)
        scored_tokens = self._tokens(clean, feat_lens).flatten(0, 1)[rows]
        encoded = self._encode_masked(noisy, feat_lens, is_masked)
        logits = self.decoder.logits(encoded.flatten(0, 1)[rows])
        nll_sum, num_tokens = masked_nll(logits, scored_tokens)
        predicted, num_classes = logits.detach().argmax(dim=1), self.config.quantizer.num_classes
        return Tally(
            nll_sum,
            nll_sum.new_tensor(num_tokens),
            (predicted == scored_tokens).float().mean(dim=1).sum(),
            token_counts(scored_tokens, num_classes).float(),
            token_counts(predicted, num_classes).float(),
        )

    def _tokens(
        self, clean: Float[Tensor, "batch mels frames"], feat_lens: Int[Tensor, " batch"]
    ) -> Int[Tensor, "batch enc_frames codebooks"]:
        if self.config.masking.position == "pre_conv":
            tokens: Tensor = self.quantizer(clean)
            return tokens
        with torch.no_grad():
            subsampled, _ = self.encoder.pre_encode(clean, feat_lens)
            tokens = self.quantizer(subsampled.transpose(1, 2))
        return tokens

    def _encode_masked(
        self,
        noisy: Float[Tensor, "batch mels frames"],
        feat_lens: Int[Tensor, " batch"],
        is_masked: Bool[Tensor, "batch masked_frames"],
    ) -> Float[Tensor, "batch enc_frames dim"]:
        if self.config.masking.position == "pre_conv":
            encoded: Tensor = self.encoder(self.mask_processor.apply_mask(noisy, is_masked), feat_lens)[0]
            return encoded
        subsampled, enc_lens = self.encoder.pre_encode(noisy, feat_lens)
        masked = self.mask_processor.apply_mask(subsampled.transpose(1, 2), is_masked).transpose(1, 2)
        return self.encoder.encode(masked, enc_lens)

    def training_step(self, batch: AudioNoiseBatch, batch_idx: int) -> Tensor:  # noqa: ARG002 - Lightning's signature
        """Returns the summed loss of a microbatch; its gradients are divided when the optimizer steps."""
        torch.manual_seed(self._key("dropout", batch))
        tally = self._tally_batch(batch, "mask")
        if self._step is None:
            self._step = StepSums(self._norms, self.config.quantizer.num_codebooks)
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
        self._check_whole(sums)
        totals = sums.unflatten(self._sum_over_ranks(sums.flatten(is_leaving=self.is_leaving)))
        tally = totals.tally
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [p.grad for p in parameters]
        torch._foreach_div_(grads, tally.num_tokens.clamp(min=1))
        norm = torch.nn.utils.get_total_norm(grads)
        # The one point of a step where a GPU is waited for.
        num_broken, num_leaving, grad_norm = torch.stack([totals.num_broken, totals.num_leaving, norm]).tolist()
        nestguard.current().beat(nestguard.Phase.OPTIMIZER)
        self.has_to_leave = num_leaving > 0
        is_skipped = num_broken > 0 or not math.isfinite(grad_norm)
        self._count_skipped(sums, is_skipped)
        self.log("steps_skipped", float(self._num_skipped), batch_size=1)
        if is_skipped:
            for parameter in parameters:
                parameter.grad = None  # which the optimizer passes over
            return
        for module, statistics in zip(self._norms, totals.statistics, strict=True):
            module.update(statistics)
        faded = 0.0 if self._faded_counts is None else self._faded_counts
        self._faded_counts = _FADING * faded + torch.stack([tally.token_counts, tally.predicted_counts])
        self._log_tally("train", tally, self._faded_counts)
        self.log("lr", optimizer.param_groups[0]["lr"], batch_size=1)
        self.log("grad_norm", norm, batch_size=1)

    def on_train_epoch_end(self) -> None:
        """Checks that the data did not end in the midst of a step, from which no rank would come back.

        Raises:
            TrainingError: They did.
        """
        if self._step is not None and not self.trainer.should_stop:
            self._check_whole(self._step)

    def _check_whole(self, sums: StepSums) -> None:
        share = self.trainer.accumulate_grad_batches
        if sums.num_microbatches != share:
            raise TrainingError(
                f"the data of rank {self.global_rank} ended in the midst of step {self.trainer.global_step}, after "
                f"{sums.num_microbatches} of {share} microbatches. The loader is not the one of NestDataModule, or has "
                "lost a worker: start the run again."
            )

    def _count_skipped(self, sums: StepSums, is_skipped: bool) -> None:
        self._num_skipped += is_skipped
        self._num_skipped_in_a_row = self._num_skipped_in_a_row + 1 if is_skipped else 0
        if not is_skipped:
            return
        limit = self.config.optimizer.max_skipped_steps
        if self.trainer.precision == "16-mixed":
            limit += _SCALER_STEPS
        said = f"step {self.trainer.global_step} is skipped on all ranks; on rank {self.global_rank} {sums.suspects()}"
        if self._num_skipped_in_a_row > limit:
            raise TrainingError(
                f"{self._num_skipped_in_a_row} steps in a row are no numbers, more than "
                f"optimizer.max_skipped_steps allows ({limit}); {said}. Lower optimizer.lr, or go on from an earlier "
                "checkpoint."
            )
        warnings.warn(f"{said}.", SkippedStepWarning, stacklevel=2)

    def validation_step(self, batch: AudioNoiseBatch, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Adds up a microbatch, with masks that are the same at every validation."""
        values = self._tally_batch(batch, "validation mask").flatten()
        self._val_tally = values if self._val_tally is None else self._val_tally + values

    def on_validation_epoch_end(self) -> None:
        """Logs loss, entropy and accuracy over all microbatches of all ranks."""
        assert self._val_tally is not None
        tally = Tally.unflatten(self._sum_over_ranks(self._val_tally), self.config.quantizer.num_codebooks)
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
        # Else Lightning takes a fused optimizer for one that unscales gradients, and refuses to clip them.
        cast(Any, optimizer)._step_supports_amp_scaling = False
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
        if isinstance(self.trainer.strategy, DDPStrategy):
            # Gradients are otherwise laid out anew after the first backward pass of a process, and with it the order in
            # which those of three and more ranks are added up. Buffers are the same on all ranks already.
            self.trainer.strategy._ddp_kwargs.update(find_unused_parameters=True, broadcast_buffers=False)
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
        if self.trainer.world_size == 1:
            return
        step = self.trainer.global_step
        ends = torch.tensor([step, -step], device=self.device)
        torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
        last, first = int(ends[0]), -int(ends[1])
        if first != last:
            raise ConfigError(
                f"rank {self.global_rank} would go on from step {step}, others from {first} to {last}: they have found "
                "different checkpoints. Give all of them the same --ckpt_path, on a disk that all nodes see."
            )

    def teardown(self, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        """Leaves batch norm as torch has it; what comes here has trained to its end."""
        part_at_exit()
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
        """Stores the configuration, from which `from_checkpoint` rebuilds the model, and what the run is."""
        checkpoint[CONFIG_KEY] = asdict(self.config)
        checkpoint[_SETTINGS_KEY] = self._run_settings()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on only with the data and settings of the checkpoint, on any number of ranks.

        Raises:
            ConfigError: Data or settings are others.
        """
        if self._trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return
        if _SETTINGS_KEY in checkpoint:
            check_unchanged(checkpoint[_SETTINGS_KEY], self._run_settings())
        scale_progress(checkpoint, self.trainer.accumulate_grad_batches)

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
        model = cls(read_config(path))
        load_whole(model, path)
        return model

    def _tally_batch(self, batch: AudioNoiseBatch, purpose: str) -> Tally:
        # Clean and noisy go through the features together; in training each is dithered by itself.
        both = torch.cat([batch.audio, batch.noisy_audio])
        feats, feat_lens = self.features(both, batch.audio_len.repeat(2))
        (clean, noisy), feat_lens = feats.chunk(2), feat_lens[: len(batch.audio)]
        generator = torch.Generator(device=feats.device).manual_seed(self._key(purpose, batch))
        lens, num_frames = feat_lens, feats.shape[-1]
        if self.config.masking.position == "post_conv":
            lens, num_frames = (
                self.encoder.pre_encode.out_lens(lens),
                num_frames // self.config.encoder.subsampling_factor,
            )
        is_masked = self.mask_processor.draw(lens, num_frames, generator)
        return self.tally(clean, noisy, feat_lens, is_masked)

    def _key(self, purpose: str, batch: AudioNoiseBatch) -> int:
        return derive_key(self.config.seed, purpose, batch.key.step, batch.key.microbatch) >> 1

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        """Of which a GPU may still be waited for when this returns."""
        nestguard.current().beat_collective(self.trainer.global_step)
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def _log_tally(self, stage: str, tally: Tally, counts: Tensor, *, prog_bar: bool = False) -> None:
        num_tokens = tally.num_tokens.clamp(min=1)
        of_tokens, of_predictions = token_entropy(counts[0]), token_entropy(counts[1])
        self.log(f"{stage}_loss", tally.nll_sum / num_tokens, prog_bar=True, batch_size=1)
        self.log(f"{stage}_token_entropy", of_tokens, prog_bar=prog_bar, batch_size=1)
        figures = {
            "accuracy": tally.num_correct / num_tokens,
            "codebook_use": (counts[0] > 0.5).float().mean(),
            "token_perplexity": of_tokens.exp(),
            "prediction_entropy": of_predictions,
            "prediction_perplexity": of_predictions.exp(),
        }
        self.log_dict({f"{stage}_{name}": value for name, value in figures.items()}, batch_size=1)
