"""Runs `nestmodel` with other targets or another loss than NEST's, for `demo_settings.py` only.

    python -m benchmarks.learning.parts.fit_targets NAME fit --config demo ...

NAME is one or more of `CHANGES`, joined by `+`. A change replaces methods of the network in this process; the settings,
the weights that are trained and the files are those of any other run. `fit_quantizer` and `fit_teacher` compute targets
from the audio of training.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sklearn.cluster import MiniBatchKMeans
from torch import Tensor

from nestcli.nestmodel import main as nestmodel
from nestdata import Corpus
from nestmodel import NestConfig, NestModel, load_network
from nestmodel.evaluate.encode import iterate_corpus, iterate_features, stacked_mel_function
from nestmodel.nn import loss
from nestmodel.nn.network import NestNetwork, NestOutput
from nestmodel.nn.network_input import Masks, NetworkInput
from nestmodel.nn.quantizer import RandomProjectionQuantizer

FIT_SECONDS = 1800
"""Seconds of training audio, evenly spread over the corpus, from which targets are fitted."""

TEMPERATURE = 0.05
"""Temperature of the softmax over cosine similarities that makes soft tokens; their perplexity is about 8 then."""

TEACHER = "TEACHER"
"""Environment variable with the folder of the teacher."""


def fit_quantizer(corpus: Corpus, config: NestConfig, path: Path) -> None:
    """Writes weights of a quantizer whose rows are principal components, and whose codes are centres of k-means."""
    model = NestModel(config)
    rows = spread_rows(corpus)
    found = iterate_corpus(model, corpus, stacked_mel_function(model), device="cpu", rows=rows)
    stacks = np.concatenate([one.values[0] for one in found])
    directions = np.linalg.eigh(np.cov(stacks, rowvar=False).astype(np.float64))[1]
    components = directions[:, : -config.quantizer.code_dim - 1 : -1].T.astype(np.float32)
    points = F.normalize(torch.from_numpy(stacks @ components.T), dim=-1).numpy()
    codes = torch.from_numpy(centres(points, config.quantizer.num_classes)).unsqueeze(0)
    save_file({"quantizer.proj.weight": torch.from_numpy(components).contiguous(), "quantizer.codebooks": codes}, path)


def fit_teacher(corpus: Corpus, checkpoint: Path, layer: int, directory: Path, num_classes: int) -> None:
    """Writes the centres of k-means of a layer of an encoder, which `second` takes as targets.

    Args:
        corpus: Audio of training.
        checkpoint: The encoder.
        layer: Number of its output; see `nestmodel.iterate_features`.
        directory: Folder to write to.
        num_classes: Number of centres.
    """
    directory.mkdir(exist_ok=True)
    found = iterate_features(load_network(checkpoint), corpus, (layer,), device="cpu", rows=spread_rows(corpus))
    codes = torch.from_numpy(centres(np.concatenate([one.values[0] for one in found]), num_classes))
    save_file({"codes": codes, "layer": torch.tensor(layer)}, directory / "codes.safetensors")
    (directory / "teacher.ckpt").unlink(missing_ok=True)
    (directory / "teacher.ckpt").symlink_to(checkpoint.resolve())


def spread_rows(corpus: Corpus) -> Sequence[int]:
    """Returns utterances of `FIT_SECONDS` in total, evenly spread over a corpus, which is sorted by length."""
    seconds = sum(corpus.num_samples_of(row) for row in range(len(corpus))) / corpus.sampling_rate
    return range(0, len(corpus), max(1, round(seconds / FIT_SECONDS)))


def centres(points: NDArray[np.float32], num_classes: int) -> NDArray[np.float32]:
    """Returns the centres of k-means."""
    clusters = MiniBatchKMeans(num_classes, batch_size=10_000, n_init=3, random_state=0, max_iter=50)
    found: NDArray[np.float32] = clusters.fit(points).cluster_centers_.astype(np.float32)
    return found


def score_all_frames() -> None:
    """Scores every frame, masked or not: the encoder also predicts the tokens of the clean speech that it reads."""
    draw_masks = NestNetwork.draw_masks

    def draw(self: NestNetwork, batch: Any, *, mask_purpose: str = "mask") -> Masks:
        masks = draw_masks(self, batch, mask_purpose=mask_purpose)
        return _with_scored(masks, _is_token(self, batch, masks))

    NestNetwork.draw_masks = draw  # type: ignore[method-assign]


def predict_next_token() -> None:
    """Masks nothing: each frame predicts the token after its own, which an encoder without look-ahead has not read.

    Source: NEST-RQ, arXiv:2409.08680.
    """
    draw_masks, tokens = NestNetwork.draw_masks, NestNetwork.tokens

    def draw(self: NestNetwork, batch: Any, *, mask_purpose: str = "mask") -> Masks:
        masks = draw_masks(self, batch, mask_purpose=mask_purpose)
        has_next = _is_token(self, batch, masks).roll(-1, dims=1)
        has_next[:, -1] = False
        return _with_scored(replace(masks, is_masked=torch.zeros_like(masks.is_masked)), has_next)

    def next_tokens(self: NestNetwork, clean: Tensor, feat_lens: Tensor, rows: Tensor) -> Tensor:
        return tokens(self, clean, feat_lens, rows + 1)

    NestNetwork.draw_masks = draw  # type: ignore[method-assign]
    NestNetwork.tokens = next_tokens  # type: ignore[assignment,method-assign]


def _is_token(network: NestNetwork, batch: Any, masks: Masks) -> Bool[Tensor, "batch enc_frames"]:
    """Returns True for the tokens that are in an utterance, not in padding."""
    lens = network.encoder.pre_encode.token_lens(batch.audio_len.cpu() // network.config.features.hop_length)
    return torch.arange(masks.is_scored.shape[1]) < lens.unsqueeze(1)


def _with_scored(masks: Masks, is_scored: Bool[Tensor, "batch enc_frames"]) -> Masks:
    return replace(masks, is_scored=is_scored, scored_rows=is_scored.flatten().nonzero().squeeze(1))


def score_inner_layers() -> None:
    """In training, scores the output of block 2 as well as the last one, by the same decoder."""
    predict = NestNetwork.forward_masked

    def forward_masked(self: NestNetwork, batch: NetworkInput) -> NestOutput:
        if not self.training:
            return predict(self, batch)
        inner: list[Tensor] = []
        hook = self.encoder.layers[1].register_forward_hook(lambda _module, _inputs, output: inner.append(output))
        with hook:
            last = predict(self, batch)
        if inner[0].shape[1] != batch.is_scored.shape[1]:
            raise SystemExit("An encoder with causal_downsampling has more frames than tokens.")
        logits = self.decoder.logits(inner[0].flatten(0, 1)[batch.scored_rows])
        return replace(last, logits=torch.cat([logits, last.logits]), targets=last.targets.repeat(2, 1))

    NestNetwork.forward_masked = forward_masked  # type: ignore[method-assign]


def normalise_stacks() -> None:
    """Normalises each stack of frames before it is projected."""
    forward = RandomProjectionQuantizer.forward

    def normalised(
        self: RandomProjectionQuantizer, feats: Float[Tensor, "batch dim frames"], rows: Tensor | None = None
    ) -> Int[Tensor, "*points codebooks"]:
        dim, factor = feats.shape[1], self.proj.in_features // feats.shape[1]
        stacks = feats.float().transpose(1, 2).unflatten(1, (-1, factor)).flatten(2)
        stacks = F.layer_norm(stacks, (dim * factor,))
        return forward(self, stacks.unflatten(2, (factor, dim)).flatten(1, 2).transpose(1, 2), rows)

    RandomProjectionQuantizer.forward = torch.no_grad()(normalised)  # type: ignore[method-assign]


def soften_tokens() -> None:
    """In training, adds the Kullback-Leibler divergence of the predictions from soft tokens.

    A soft token is a softmax over the codes of a codebook, of their similarity to the projected stack of clean frames:
    a prediction of a similar code costs less than one of another. It adds as much to the loss as the token does. Such
    a loss is the idea of arXiv:2501.16131; the formula is our own.
    """
    forward, nll = RandomProjectionQuantizer.forward, loss.masked_nll
    soft: list[Float[Tensor, "scored classes codebooks"]] = []

    def keep_soft_tokens(self: RandomProjectionQuantizer, feats: Tensor, rows: Tensor | None = None) -> Tensor:
        if rows is not None:
            similarity = torch.einsum("pbd,bcd->pcb", self.project(feats, rows), self.codebooks)
            soft[:] = [similarity.div(TEMPERATURE).softmax(1)]
        return forward(self, feats, rows)

    def nll_and_divergence(logits: Tensor, tokens: Tensor) -> tuple[Tensor, int]:
        nll_sum, num_tokens = nll(logits, tokens)
        if not logits.requires_grad:
            return nll_sum, num_tokens
        divergence = F.kl_div(logits.float().log_softmax(1), soft[0], reduction="sum")
        return nll_sum + divergence / logits.shape[2], num_tokens

    RandomProjectionQuantizer.forward = torch.no_grad()(keep_soft_tokens)  # type: ignore[method-assign]
    loss.masked_nll = nll_and_divergence


def learn_from_teacher() -> None:
    """Takes the clusters of a layer of an earlier encoder, which reads the clean speech, as tokens."""
    directory = Path(os.environ[TEACHER])
    teacher = load_network(directory / "teacher.ckpt").eval().requires_grad_(False)
    kept = load_file(directory / "codes.safetensors")
    codes = kept["codes"]
    teacher.encoder.layers = teacher.encoder.layers[: int(kept["layer"])]
    offsets = codes.square().sum(1) / -2

    @torch.no_grad()
    def tokens(_self: NestNetwork, clean: Tensor, feat_lens: Tensor, rows: Tensor | None = None) -> Tensor:
        frames, _ = teacher.encoder(clean, feat_lens)
        points = frames if rows is None else frames.flatten(0, 1)[rows]
        tokens: Tensor = (points @ codes.T + offsets).argmax(-1, keepdim=True)
        return tokens

    NestNetwork.tokens = tokens  # type: ignore[assignment,method-assign]


CHANGES: dict[str, Callable[[], None]] = {
    "all": score_all_frames,
    "inner": score_inner_layers,
    "next": predict_next_token,
    "norm": normalise_stacks,
    "second": learn_from_teacher,
    "soft": soften_tokens,
}

if __name__ == "__main__":
    for change in sys.argv.pop(1).split("+"):
        CHANGES[change]()
    sys.exit(nestmodel(sys.argv[1:]))
