"""The NEST model: a Lightning module that only wires plain modules together, feeds them keyed randomness, and logs.

Everything random in a training step is keyed by (seed, step, microbatch), so there is no generator state to save. The
loss is the mean over the scored tokens of a whole optimizer step, over all microbatches and ranks: sums are
accumulated, and their count scales the gradients once, when the optimizer steps.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from jaxtyping import Bool, Float, Int
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from nestdata import AudioNoiseBatch, derive_key
from nestmodel.config import NestConfig
from nestmodel.decoder import MultiSoftmaxDecoder
from nestmodel.encoder import ConformerEncoder
from nestmodel.errors import ConfigError
from nestmodel.features import Preprocessor
from nestmodel.loss import masked_nll
from nestmodel.masking import BlockMask, counted_tokens
from nestmodel.metrics import token_counts, token_entropy
from nestmodel.quantizer import RandomProjectionQuantizer
from nestmodel.schedule import noam_lr
from nestmodel.weights import CONFIG_KEY, WeightParts, load_weights, load_whole, read_config, unlike_settings

# The entropy of the tokens of one step is too low, since few of the classes occur in it: counts fade over about this
# many steps instead.
_FADING = 1 - 1 / 200


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over scored tokens that can be added up over microbatches and ranks."""

    nll_sum: Float[Tensor, ""]
    """Negative log-likelihood in nats, averaged over codebooks."""

    num_tokens: Float[Tensor, ""]
    """Scored encoder frames."""

    num_correct: Float[Tensor, ""]
    """Those whose most likely class is the token, averaged over codebooks."""

    token_counts: Float[Tensor, "codebooks classes"]
    """How often each class occurs among the scored tokens."""

    predicted_counts: Float[Tensor, "codebooks classes"]
    """How often each class is the most likely one."""

    def flatten(self) -> Float[Tensor, " values"]:
        """Packs everything into one vector, so that one collective adds it up."""
        heads = torch.stack([self.nll_sum.detach(), self.num_tokens, self.num_correct])
        return torch.cat([heads, self.token_counts.flatten(), self.predicted_counts.flatten()])

    @classmethod
    def unflatten(cls, values: Float[Tensor, " values"], num_codebooks: int) -> "Tally":
        """Unpacks what `flatten` packed."""
        return cls(*values[:3], *values[3:].unflatten(0, (2, num_codebooks, -1)))


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
        self._step_tally: Tensor | None = None
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
        values = tally.flatten()
        self._step_tally = values if self._step_tally is None else self._step_tally + values
        # Undoes the means that Lightning takes over microbatches and DDP over ranks.
        return tally.nll_sum * self.trainer.accumulate_grad_batches * self.trainer.world_size

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the number of scored tokens of the step, and logs the step."""
        assert self._step_tally is not None
        tally = self._sum_over_ranks(self._step_tally)
        self._step_tally = None
        num_tokens = tally.num_tokens.clamp(min=1)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_div_(grads, num_tokens)
        faded = 0.0 if self._faded_counts is None else self._faded_counts
        self._faded_counts = _FADING * faded + torch.stack([tally.token_counts, tally.predicted_counts])
        self._log_tally("train", tally, self._faded_counts)
        self.log("lr", optimizer.param_groups[0]["lr"], batch_size=1)
        self.log("grad_norm", torch.nn.utils.get_total_norm(grads), batch_size=1)

    def validation_step(self, batch: AudioNoiseBatch, batch_idx: int) -> None:  # noqa: ARG002 - Lightning's signature
        """Adds up a microbatch, with masks that are the same at every validation."""
        values = self._tally_batch(batch, "validation mask").flatten()
        self._val_tally = values if self._val_tally is None else self._val_tally + values

    def on_validation_epoch_end(self) -> None:
        """Logs loss, entropy and accuracy over all microbatches of all ranks."""
        assert self._val_tally is not None
        tally = self._sum_over_ranks(self._val_tally)
        self._val_tally = None
        self._log_tally("val", tally, torch.stack([tally.token_counts, tally.predicted_counts]), prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Returns AdamW under the Noam schedule, one step of it per optimizer step."""
        config = self.config.optimizer
        parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1.0, betas=config.betas, weight_decay=config.weight_decay)
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
        if self._compiles_blocks and stage == "fit":
            self._compile()

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
        """Stores the configuration, from which `from_checkpoint` rebuilds the model."""
        checkpoint[CONFIG_KEY] = asdict(self.config)

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

    def _sum_over_ranks(self, values: Tensor) -> Tally:
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(values)
        return Tally.unflatten(values, self.config.quantizer.num_codebooks)

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
