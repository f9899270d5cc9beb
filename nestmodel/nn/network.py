"""The NEST network: features, targets, masks, encoder and decoder. It needs no trainer, no ranks and no optimizer.

Masks, attention contexts and what dropout drops depend on seeds derived from (seed, step, microbatch), so there is no
generator state to save. They are the same on every device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nestdata import AudioNoiseBatch, Microbatch, derive_key
from nestdata.config_checks import require
from nestmodel.attention_context import Context
from nestmodel.class_config import ClassConfig
from nestmodel.config import NestConfig, not_conformer
from nestmodel.errors import ConfigError
from nestmodel.nn.backend import KERNELS, Backend
from nestmodel.nn.encoder import ConformerEncoder, DropoutKeys
from nestmodel.nn.encoder_base import (
    Encoder,
    EncoderOutput,
    FeatureEncoder,
    adopt_encoder,
    build_encoder,
    check_output,
    naming_encoder,
    without_training,
)
from nestmodel.nn.features import LogMelFeatures, normalise
from nestmodel.nn.masking import BlockMask, scored_token_mask
from nestmodel.nn.network_input import Masks, NetworkInput
from nestmodel.nn.quantizer import RandomProjectionQuantizer
from nestmodel.nn.subsampling import num_subsampled


@dataclass(frozen=True, slots=True)
class NestOutput:
    """Predictions and targets of one microbatch; `loss_stats` computes the loss from it.

    The rows of `logits` and `targets` are the True values of `is_scored`, utterance by utterance.
    """

    logits: Float[Tensor, "scored classes codebooks"]
    """Logits of the classes at the scored encoder frames."""

    targets: Int[Tensor, "scored codebooks"]
    """Tokens of the clean speech at the scored encoder frames, in [0, num_classes)."""

    is_scored: Bool[Tensor, "batch enc_frames"]
    """True for the encoder frames that are scored."""

    encoded: Float[Tensor, "batch enc_frames dim"]
    """Encoder frames of the masked noisy speech. Padded frames are meaningless."""

    enc_lens: Int[Tensor, " batch"]
    """Number of valid encoder frames of each utterance."""


class MultiSoftmaxDecoder(nn.Module):
    """Predicts tokens: one softmax per codebook, by one linear layer whose channel is class · codebooks + codebook.

    The caller selects the encoder frames. The loss needs the scored ones only, which avoids most of the largest matrix
    product of a small model.

    Source: NEST, arXiv:2408.13106; the channels are in NeMo's order.
    """

    def __init__(self, *, dim: int, num_classes: int, num_codebooks: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.num_codebooks = num_codebooks
        # A convolution of width 1 is a linear layer; it is used because NeMo's weight has this shape.
        layer = nn.Conv1d(dim, num_classes * num_codebooks, 1)
        nn.init.xavier_uniform_(layer.weight)
        self.decoder_layers = nn.Sequential(layer)

    def logits(self, encoded: Float[Tensor, "*rows dim"]) -> Float[Tensor, "*rows classes codebooks"]:
        """Returns the logits of the classes for any selection of encoder frames."""
        layer = self.decoder_layers[0]
        assert isinstance(layer, nn.Conv1d)
        scores = F.linear(encoded, layer.weight.squeeze(-1), layer.bias)
        return scores.reshape(*encoded.shape[:-1], self.num_classes, self.num_codebooks)

    def forward(
        self, encoded: Float[Tensor, "batch enc_frames dim"]
    ) -> Float[Tensor, "batch enc_frames classes codebooks"]:
        """Returns the log-probabilities of the classes at every encoder frame, in nats."""
        return self.logits(encoded).log_softmax(dim=-2)


def _build_targets(config: NestConfig, encoder: Encoder | None) -> tuple[RandomProjectionQuantizer, BlockMask, int]:
    """Returns the quantizer, the masks, and the number of masked frames that belong to a token.

    Args:
        config: Settings of the network.
        encoder: An encoder of another author; None for FastConformer.

    Raises:
        ConfigError: A token does not cover a whole number of log-mel frames, or a batch a whole number of tokens.
    """
    features, mels, source = config.features, config.features.num_mels, config.quantizer.source
    factor = (config.conformer if encoder is None else encoder).subsampling_factor
    own, name = encoder if isinstance(encoder, FeatureEncoder) else None, type(encoder).__name__
    expected = "log_mels, unless the encoder brings its own features"
    require(own is not None or source == "log_mels", "quantizer.source", source, expected)
    if config.masking.position == "post_conv":
        dim = config.conformer.d_model
        quantizer = RandomProjectionQuantizer(config.quantizer, dim=dim, num_stacked=1)
        return quantizer, BlockMask(config.masking, dim=dim, subsampling_factor=factor), 1
    dim, hop = (own.num_features, own.hop_length) if own else (mels, features.hop_length)
    per_token: float = factor * hop / features.hop_length
    is_whole = per_token.is_integer() and features.pad_to % per_token == 0
    expected = f"a multiple of the log-mel frames of an encoder frame of {name}, which are {per_token:g}"
    require(is_whole, "features.pad_to", features.pad_to, expected)
    target_dim, num_stacked = (dim, factor) if source == "encoder" else (mels, int(per_token))
    quantizer = RandomProjectionQuantizer(config.quantizer, dim=target_dim, num_stacked=num_stacked)
    return quantizer, BlockMask(config.masking, dim=dim), factor


class NestNetwork(nn.Module):
    """Reads noisy speech with blocks of frames masked, and predicts tokens of the clean speech.

    The parts are plain modules: `features`, `quantizer`, `mask_processor`, `encoder`, `decoder`. In the state dict,
    they are named as in NeMo's EncDecDenoiseMaskedTokenPredModel.

    Args:
        config: All sizes and settings; initial weights are drawn from its seed.
        encoder: An encoder of another author, in place of the one that `config.encoder` describes.

    Raises:
        ConfigError: The encoder cannot be built, or its sizes do not fit the settings.

    Source: NEST, arXiv:2408.13106.
    """

    config: NestConfig
    """All sizes and settings."""

    source: str | None
    """The file that the network was loaded from; None for initial weights."""

    backend: Backend
    """What computes a training step; see `use_backend`."""

    def __init__(self, config: NestConfig, encoder: Encoder | None = None) -> None:
        super().__init__()
        if encoder is not None:
            of_ours = encoder.config if isinstance(encoder, ConformerEncoder) else None
            config = replace(config, encoder=of_ours or ClassConfig.of(encoder))
        self.config = config
        self.source = None
        self.backend = KERNELS
        if isinstance(config.encoder, ClassConfig):
            with torch.random.fork_rng(devices=[]):  # so that numbers drawn by the class do not affect the other parts
                torch.manual_seed(derive_key(config.seed, "encoder weights"))
                encoder = build_encoder(config.encoder) if encoder is None else encoder
            adopt_encoder(encoder)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_key(config.seed, "weights"))
            self.preprocessor = nn.ModuleDict({"featurizer": LogMelFeatures(config.features)})
            self.quantizer, self.mask_processor, self.num_stacked = _build_targets(config, encoder)
            if encoder is None:
                encoder = ConformerEncoder(config.conformer, num_mels=config.features.num_mels)
            self.encoder = encoder
            self.decoder = MultiSoftmaxDecoder(
                dim=self.encoder.dim,
                num_classes=config.quantizer.num_classes,
                num_codebooks=config.quantizer.num_codebooks,
            )

    @property
    def features(self) -> LogMelFeatures:
        """Computes (feats, feat_lens) from (audio, audio_lens); `preprocessor.featurizer` in NeMo's state dict."""
        features = self.preprocessor["featurizer"]
        assert isinstance(features, LogMelFeatures)
        return features

    @property
    def conformer(self) -> ConformerEncoder:
        """The FastConformer encoder.

        Raises:
            ConfigError: The encoder is of another class.
        """
        if isinstance(self.encoder, ConformerEncoder):
            return self.encoder
        raise not_conformer(type(self.encoder).__qualname__)

    @property
    def frame_samples(self) -> int:
        """Samples of audio from the start of one encoder frame to the start of the next."""
        encoder = self.encoder
        hop = encoder.hop_length if isinstance(encoder, FeatureEncoder) else self.config.features.hop_length
        return encoder.subsampling_factor * hop

    @property
    def frame_s(self) -> float:
        """Seconds of audio from the start of one encoder frame to the start of the next."""
        return self.frame_samples / self.config.features.sampling_rate

    def use_context(self, context: Context) -> None:
        """Uses one of the attention contexts of the encoder from now on, in training as well.

        Args:
            context: One of `att_context_size`.

        Raises:
            ConfigError: The encoder has no such context.
        """
        self.conformer.config = self.config.conformer.with_context(context)
        self.config = replace(self.config, encoder=self.conformer.config)

    def __repr__(self) -> str:
        """Returns the sizes in one line; a part such as `encoder` shows its modules."""
        encoder = self.encoder
        name = f"{encoder.num_layers} layers" if isinstance(encoder, ConformerEncoder) else type(encoder).__name__
        num_parameters, num_in_encoder = (
            sum(parameter.numel() for parameter in module.parameters()) for module in (self, self.encoder)
        )
        return (
            f"{type(self).__name__}({name} of dim {encoder.dim}, frames of {1000 * self.frame_s:g} ms; "
            f"{num_parameters:,} parameters, {num_in_encoder:,} of them in the "
            f"encoder; weights {f'from {self.source}' if self.source else 'of this program'})"
        )

    def use_backend(self, backend: Backend) -> None:
        """Sets what computes a training step, which may be changed at any time."""
        self.backend = backend
        self.features.use_backend(backend)
        if isinstance(self.encoder, ConformerEncoder):
            self.encoder.use_backend(backend)

    def forward(self, batch: AudioNoiseBatch, *, mask_purpose: str = "mask") -> NestOutput:
        """Predicts the masked tokens of a microbatch.

        Masks and dropout are determined by `seed_for`; torch's global generator draws dither. If the batch is on a GPU,
        the CPU waits for its lengths. To avoid that, call `draw_masks`, then `NetworkInput.of`, which copies the batch,
        then `forward_masked`.

        Args:
            batch: Clean and noisy audio; its key selects the masks.
            mask_purpose: Second part of the key of the masks. Another purpose gives other masks.
        """
        masks = self.draw_masks(batch, mask_purpose=mask_purpose)
        return self.forward_masked(NetworkInput.of(batch, masks, batch.audio.device))

    def draw_masks(self, batch: AudioNoiseBatch, *, mask_purpose: str = "mask") -> Masks:
        """Draws the masks of a microbatch, and in training mode the keys of dropout and the context, on the CPU.

        Args:
            batch: Its key and its lengths determine the masks.
            mask_purpose: Second part of the key of the masks. Another purpose gives other masks.
        """
        generator = torch.Generator().manual_seed(self.seed_for(mask_purpose, batch))
        lens, num_frames = self._masked_lens(batch.audio_len.cpu(), batch.audio.shape[1])
        masks = self._with_scored_rows(self.mask_processor.draw(lens, num_frames, generator))
        if not self.training or not isinstance(self.encoder, ConformerEncoder):
            return masks
        keys = self.encoder.draw_keys(self.seed_for("dropout", batch))
        return replace(
            masks, dropout_keys=keys, att_context=self.encoder.draw_context(self.seed_for("attention context", batch))
        )

    def _masked_lens(self, audio_lens: Int[Tensor, " batch"], num_samples: int) -> tuple[Int[Tensor, " batch"], int]:
        """Returns the valid frames of each utterance, of the kind that is masked, and the padded number of frames."""
        encoder, features = self.encoder, self.config.features
        if isinstance(encoder, FeatureEncoder):
            num_frames = int(encoder.feature_lens(torch.tensor([num_samples])))
            return encoder.feature_lens(audio_lens), num_frames + -num_frames % self.num_stacked
        lens, num_frames = audio_lens // features.hop_length, features.num_padded_frames(num_samples)
        if self.config.masking.position == "post_conv":
            subsampling = self.conformer.pre_encode
            num_frames = num_subsampled(num_frames, subsampling.factor, is_causal=subsampling.is_causal)
            lens = subsampling.out_lens(lens)
        return lens, num_frames

    def forward_masked(self, batch: NetworkInput) -> NestOutput:
        """Predicts the masked tokens of a microbatch whose masks are drawn; see `forward`."""
        targets, noisy, feat_lens = self._targets_and_features(batch)
        return self._predict_scored(targets, noisy, feat_lens, batch)

    def forward_contexts(self, batch: NetworkInput) -> Iterator[NestOutput]:
        """Yields the output of `forward_masked` in each attention context of the encoder, in their order.

        Features and targets are computed once.
        """
        targets, noisy, feat_lens = self._targets_and_features(batch)
        for context in self.config.contexts:
            yield self._predict_scored(targets, noisy, feat_lens, replace(batch, att_context=context))

    def _targets_and_features(
        self, batch: NetworkInput
    ) -> tuple[Int[Tensor, "scored codebooks"], Float[Tensor, "batch mels frames"], Int[Tensor, " batch"]]:
        """Returns the scored tokens of the clean audio, the features of the noisy audio, and their valid lengths."""
        if isinstance(self.encoder, FeatureEncoder):
            noisy, feat_lens = self._own_features(self.encoder, batch.noisy_audio, batch.audio_len)
            return self._own_tokens(self.encoder, batch), noisy, feat_lens
        # Features of clean and noisy audio are computed in one call. In training, each is dithered independently.
        both = torch.cat([batch.audio, batch.noisy_audio])
        feats, feat_lens = self.features(both, batch.audio_len.repeat(2))
        (clean, noisy), feat_lens = feats.chunk(2), feat_lens[: len(batch.audio)]
        return self.tokens(clean, feat_lens, batch.scored_rows), noisy, feat_lens

    def _own_features(
        self, encoder: FeatureEncoder, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch values frames"], Int[Tensor, " batch"]]:
        """Returns the features of an encoder; like log-mels, they are in float32 in every precision mode of a run."""
        with torch.autocast(audio.device.type, enabled=False), naming_encoder(encoder, "features", audio):
            feats, lens = encoder.features(audio, audio_lens)
            num_frames = int(encoder.feature_lens(torch.tensor([audio.shape[1]])))
        if feats.shape[1] != encoder.num_features or feats.shape[2] != num_frames:
            raise ConfigError(
                f"{type(encoder).__name__}.features returns the shape {tuple(feats.shape)}: expected ({len(audio)}, "
                f"num_features {encoder.num_features}, feature_lens {num_frames})."
            )
        return feats, lens

    @torch.no_grad()
    def _own_tokens(self, encoder: FeatureEncoder, batch: NetworkInput) -> Int[Tensor, "scored codebooks"]:
        """Returns the scored tokens for an encoder with features of its own."""
        if self.config.quantizer.source == "log_mels":
            clean, lens = self.features(batch.audio, batch.audio_len)
        else:
            with without_training(encoder):
                clean, lens = self._own_features(encoder, batch.audio, batch.audio_len)
        clean = F.pad(clean, (0, -clean.shape[-1] % self.quantizer.num_stacked))
        num_tokens, num_own = batch.is_scored.shape[1], clean.shape[-1] // self.quantizer.num_stacked
        utterances, frames = batch.scored_rows // num_tokens, batch.scored_rows % num_tokens
        return self.tokens(clean, lens, utterances * num_own + frames.clamp(max=num_own - 1))

    def forward_features(
        self,
        clean: Float[Tensor, "batch mels frames"],
        noisy: Float[Tensor, "batch mels frames"],
        feat_lens: Int[Tensor, " batch"],
        is_masked: Bool[Tensor, "batch masked_frames"],
    ) -> NestOutput:
        """Predicts masked tokens of clean features from noisy features.

        On a GPU, the CPU waits for the number of scored tokens; `forward_masked` does not.

        Args:
            clean: Features of the clean speech, from which the tokens are computed.
            noisy: Features of the noisy speech, which the encoder reads where they are not masked.
            feat_lens: Number of valid frames of each utterance, for both.
            is_masked: True where a frame is masked: an encoder frame if `masking.position` is post_conv, otherwise a
                feature frame.
        """
        masks = self._with_scored_rows(is_masked)
        return self._predict_scored(self.tokens(clean, feat_lens, masks.scored_rows), noisy, feat_lens, masks)

    def _predict_scored(
        self,
        targets: Int[Tensor, "scored codebooks"],
        noisy: Float[Tensor, "batch mels frames"],
        feat_lens: Int[Tensor, " batch"],
        masks: Masks,
    ) -> NestOutput:
        """Predicts the scored tokens, which are the targets.

        With `causal_downsampling` and masks before the subsampling, there is one encoder frame more than tokens (800
        feature frames give 101, and 100 tokens). It is cut off. NeMo 3.0.0 fails there, because it indexes encoder
        frames with a mask of tokens.
        """
        encoded, enc_lens = self.encode_masked(noisy, feat_lens, masks.is_masked, masks.dropout_keys, masks.att_context)
        num_tokens = masks.is_scored.shape[1]
        if encoded.shape[1] < num_tokens:
            encoded = F.pad(encoded, (0, 0, 0, num_tokens - encoded.shape[1]))
        rows = self._predicting_rows(masks.scored_rows, num_tokens, encoded.shape[1], enc_lens)
        logits = self.decoder.logits(encoded.flatten(0, 1)[rows])
        if num_tokens < encoded.shape[1]:
            encoded, enc_lens = encoded[:, :num_tokens], enc_lens.clamp(max=num_tokens)
        return NestOutput(logits, targets, masks.is_scored, encoded, enc_lens)

    def _predicting_rows(
        self, scored: Int[Tensor, " rows"], num_tokens: int, num_frames: int, enc_lens: Int[Tensor, " batch"]
    ) -> Int[Tensor, " rows"]:
        """Returns the encoder frames that predict tokens; both are counted over all utterances.

        The last tokens of an utterance, after which there are fewer frames than `target_shift`, are predicted by the
        last frame. So are tokens after the last frame of another author's encoder.
        """
        shift, is_conformer = self.config.masking.target_shift, isinstance(self.encoder, ConformerEncoder)
        if shift == 0 and num_tokens == num_frames and is_conformer:
            return scored
        utterances, frames = scored // num_tokens, scored % num_tokens
        if shift > 0 or not is_conformer:
            frames = torch.minimum(frames + shift, (enc_lens[utterances] - 1).clamp(0, num_frames - 1))
        return utterances * num_frames + frames

    def _with_scored_rows(self, is_masked: Bool[Tensor, "batch masked_frames"]) -> Masks:
        is_scored = scored_token_mask(is_masked, self.num_stacked, self.config.masking.threshold)
        rows = is_scored.flatten().nonzero().squeeze(1)
        return Masks(is_masked=is_masked, is_scored=is_scored, scored_rows=rows)

    def tokens(
        self,
        clean: Float[Tensor, "batch mels frames"],
        feat_lens: Int[Tensor, " batch"],
        rows: Int[Tensor, " rows"] | None = None,
    ) -> Int[Tensor, "*points codebooks"]:
        """Returns the tokens of clean features.

        They are computed from stacked feature frames, or from subsampled ones if `masking.position` is post_conv.

        Args:
            clean: Features.
            feat_lens: Number of valid frames of each utterance.
            rows: Encoder frames whose tokens are computed, counted over all utterances; None computes all of them.

        Returns:
            The tokens: (batch, enc_frames, codebooks), or (rows, codebooks).
        """
        quantizer, features = self.config.quantizer, self.config.features
        if self.config.masking.position == "pre_conv":
            is_raw = features.normalize == "NA" and quantizer.source == "log_mels"
            if is_raw and quantizer.normalize == "per_feature":
                clean = normalise(clean, feat_lens)
            tokens: Tensor = self.quantizer(clean, rows)
            return tokens
        with torch.no_grad():
            subsampled, _ = self.conformer.pre_encode(clean, feat_lens)
            tokens = self.quantizer(subsampled.transpose(1, 2), rows)
        return tokens

    def encode_masked(
        self,
        noisy: Float[Tensor, "batch mels frames"],
        feat_lens: Int[Tensor, " batch"],
        is_masked: Bool[Tensor, "batch masked_frames"],
        dropout_keys: DropoutKeys | None = None,
        context: Context | None = None,
    ) -> EncoderOutput:
        """Encodes noisy features that are masked before or after the subsampling, by `masking.position`.

        Args:
            noisy: Features.
            feat_lens: Number of valid frames of each utterance.
            is_masked: As in `forward_features`.
            dropout_keys: As in `ConformerEncoder.forward`.
            context: As in `ConformerEncoder.forward`.
        """
        encoder = self.encoder
        if not isinstance(encoder, ConformerEncoder):
            masked = self.mask_processor.apply_mask(noisy, is_masked[:, : noisy.shape[-1]])
            with naming_encoder(encoder, "forward", masked):
                encoded = encoder(masked, feat_lens)
            return check_output(encoder, encoded, feat_lens, noisy.shape[-1])
        if self.config.masking.position == "pre_conv":
            masked = self.mask_processor.apply_mask(noisy, is_masked)
            output: EncoderOutput = encoder(masked, feat_lens, dropout_keys, context)
            return output
        subsampled, enc_lens = encoder.pre_encode(noisy, feat_lens)
        masked = self.mask_processor.apply_mask(subsampled.transpose(1, 2), is_masked).transpose(1, 2)
        return EncoderOutput(encoder.encode(masked, enc_lens, dropout_keys, context), enc_lens)

    def read_features(
        self, audio: Float[Tensor, "batch samples"], audio_lens: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch values frames"], Int[Tensor, " batch"]]:
        """Returns the input of the encoder, log-mels or its own features, and the valid frames of each utterance."""
        if isinstance(self.encoder, FeatureEncoder):
            # Convolutions refuse audio that is shorter than their first frame.
            shortest = self.config.features.sampling_rate
            return self._own_features(self.encoder, F.pad(audio, (0, max(0, shortest - audio.shape[1]))), audio_lens)
        feats, lens = self.features(audio, audio_lens)
        return feats, lens

    def seed_for(self, purpose: str, batch: Microbatch) -> int:
        """Returns the 63-bit seed of the random numbers drawn for a purpose in a microbatch."""
        return derive_key(self.config.seed, purpose, *batch.key) >> 1
