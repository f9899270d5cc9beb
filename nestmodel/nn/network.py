"""The NEST network: its parts, and what they make of a batch. Knows no trainer, no ranks and no optimizer.

All that is random is keyed by (seed, step, microbatch), so that there is no generator state to save.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nestdata import AudioNoiseBatch, derive_key
from nestmodel.config import NestConfig
from nestmodel.nn.decoder import MultiSoftmaxDecoder
from nestmodel.nn.encoder import ConformerEncoder
from nestmodel.nn.features import Preprocessor
from nestmodel.nn.loss import masked_nll
from nestmodel.nn.loss_stats import LossStats
from nestmodel.nn.masking import BlockMask, scored_token_mask
from nestmodel.nn.metrics import token_counts
from nestmodel.nn.quantizer import RandomProjectionQuantizer


class NestNetwork(nn.Module):
    """Reads noisy speech with blocks of frames masked, and predicts tokens of the clean speech.

    The parts are plain modules: `features`, `quantizer`, `mask_processor`, `encoder`, `decoder`. Their names in the
    state dict are those of NeMo's EncDecDenoiseMaskedTokenPredModel.

    Args:
        config: All sizes and settings; weights are drawn from its seed.

    Source: NEST, arXiv:2408.13106.
    """

    def __init__(self, config: NestConfig) -> None:
        super().__init__()
        self.config = config
        num_mels, quantizer, dim = config.features.num_mels, config.quantizer, config.encoder.d_model
        is_pre_conv, factor = config.masking.position == "pre_conv", config.encoder.subsampling_factor
        # Masks lie on feature frames, of which as many as an encoder frame covers make a token, or on encoder frames.
        masked_dim, self.num_stacked = (num_mels, factor) if is_pre_conv else (dim, 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_key(config.seed, "weights"))
            self.preprocessor = Preprocessor(config.features)
            self.quantizer = RandomProjectionQuantizer(quantizer, dim=masked_dim, num_stacked=self.num_stacked)
            self.mask_processor = BlockMask(
                config.masking, dim=masked_dim, subsampling_factor=factor // self.num_stacked
            )
            self.encoder = ConformerEncoder(config.encoder, num_mels=num_mels)
            self.decoder = MultiSoftmaxDecoder(
                dim=dim, num_classes=quantizer.num_classes, num_codebooks=quantizer.num_codebooks
            )

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
    ) -> LossStats:
        """Scores the masked tokens of clean features, as read from noisy ones.

        Args:
            clean: Features of the clean speech, from which the tokens come.
            noisy: Features of the noisy speech, which the encoder reads where it is not masked.
            feat_lens: Valid frames of both.
            is_masked: True where the encoder sees the mask instead; over encoder frames where `masking.position` is
                post_conv, over feature frames elsewhere.
        """
        # The scored rows are looked for before the encoder runs, since a GPU has to be waited for to count them.
        is_scored = scored_token_mask(is_masked, self.num_stacked, self.config.masking.threshold)
        rows = is_scored.flatten().nonzero().squeeze(1)
        scored_tokens = self.tokens(clean, feat_lens).flatten(0, 1)[rows]
        encoded = self.encode_masked(noisy, feat_lens, is_masked)
        logits = self.decoder.logits(encoded.flatten(0, 1)[rows])
        nll_sum, num_tokens = masked_nll(logits, scored_tokens)
        predicted, num_classes = logits.detach().argmax(dim=1), self.config.quantizer.num_classes
        return LossStats(
            nll_sum,
            nll_sum.new_tensor(num_tokens),
            (predicted == scored_tokens).float().mean(dim=1).sum(),
            token_counts(scored_tokens, num_classes).float(),
            token_counts(predicted, num_classes).float(),
        )

    def tokens(
        self, clean: Float[Tensor, "batch mels frames"], feat_lens: Int[Tensor, " batch"]
    ) -> Int[Tensor, "batch enc_frames codebooks"]:
        """Returns the tokens of clean features: of stacked frames, or where masks come later, of subsampled ones."""
        if self.config.masking.position == "pre_conv":
            tokens: Tensor = self.quantizer(clean)
            return tokens
        with torch.no_grad():
            subsampled, _ = self.encoder.pre_encode(clean, feat_lens)
            tokens = self.quantizer(subsampled.transpose(1, 2))
        return tokens

    def encode_masked(
        self,
        noisy: Float[Tensor, "batch mels frames"],
        feat_lens: Int[Tensor, " batch"],
        is_masked: Bool[Tensor, "batch masked_frames"],
    ) -> Float[Tensor, "batch enc_frames dim"]:
        """Returns what the encoder makes of noisy features that are masked, before or after its subsampling."""
        if self.config.masking.position == "pre_conv":
            encoded: Tensor = self.encoder(self.mask_processor.apply_mask(noisy, is_masked), feat_lens)[0]
            return encoded
        subsampled, enc_lens = self.encoder.pre_encode(noisy, feat_lens)
        masked = self.mask_processor.apply_mask(subsampled.transpose(1, 2), is_masked).transpose(1, 2)
        return self.encoder.encode(masked, enc_lens)

    def tally_batch(self, batch: AudioNoiseBatch, purpose: str) -> LossStats:
        """Scores the masked tokens of a microbatch, with masks keyed by its place and a purpose."""
        # Clean and noisy go through the features together; in training each is dithered by itself.
        both = torch.cat([batch.audio, batch.noisy_audio])
        feats, feat_lens = self.features(both, batch.audio_len.repeat(2))
        (clean, noisy), feat_lens = feats.chunk(2), feat_lens[: len(batch.audio)]
        generator = torch.Generator(device=feats.device).manual_seed(self.key(purpose, batch))
        lens, num_frames = feat_lens, feats.shape[-1]
        if self.config.masking.position == "post_conv":
            lens, num_frames = (
                self.encoder.pre_encode.out_lens(lens),
                num_frames // self.config.encoder.subsampling_factor,
            )
        is_masked = self.mask_processor.draw(lens, num_frames, generator)
        return self.tally(clean, noisy, feat_lens, is_masked)

    def key(self, purpose: str, batch: AudioNoiseBatch) -> int:
        """Returns the seed of what is drawn for a purpose in a microbatch, of 63 bits."""
        return derive_key(self.config.seed, purpose, batch.key.step, batch.key.microbatch) >> 1
