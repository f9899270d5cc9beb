"""Scores of an encoder without labels: rank of features, clusters against acoustic units, agreement under noise.

`score_features` encodes held-out audio without masks. The audio, the noise and all draws are keyed by the audio alone:
checkpoints of any run with the same frame rate are scored on the same frames. Half of the utterances fit the clusters,
and the others are scored. scikit-learn belongs to the extra `probe`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray

from nestdata import AudioError, Corpus, NoiseSampler, derive_key
from nestdata.field_docs import with_field_docs
from nestdata.stateless_rng import StatelessRng
from nestmodel.attention_context import Context, context_name
from nestmodel.errors import ConfigError, ProbeError
from nestmodel.evaluate.features.batch import (
    BatchFunction,
    FeatureProblem,
    compute_batch,
    layer_function,
    log_mel_function,
    resolve_layers,
)
from nestmodel.evaluate.features.encode import iterate_corpus
from nestmodel.evaluate.features.inputs import check_rate
from nestmodel.evaluate.frame_units import Numbers, cluster_score, mfcc_units, unit_clusters
from nestmodel.nn.network import NestNetwork

MAX_RANK_FRAMES = 4096
"""The rank is taken over at most this number of frames, which are drawn by a key: it depends on their number."""

MAX_SNR_DB = 100
"""Largest ratio of speech power to noise power, in dB, and the negative of the smallest one."""

_LAYER_SCORES = ("rankme", "pnmi", "agreement", "kappa")
_TOKEN_SCORES = ("agreement", "kappa")
_SEED = 0
"""Not the seed of the run, so that runs with other seeds are scored on the same audio."""


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class FeatureScoreConfig:
    """On what an encoder is scored without labels."""

    seconds: float = 600.0
    """Seconds of held-out audio: utterances are drawn by a key until they last as long, or all are taken."""

    layers: Literal["all", "last"] | list[int] = "all"
    """Numbers of the encoder outputs: 0 is the input of the first block, i the output of the i-th block."""

    num_units: int = 100
    """Clusters of a layer, and acoustic units with which they are compared."""

    snr_db: float = 10.0
    """Ratio of speech power to noise power, in dB, of the noisy audio."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"FeatureScores.config.seconds is {self.seconds:g}: give a positive number.")
        if not abs(self.snr_db) <= MAX_SNR_DB:
            raise ConfigError(
                f"FeatureScores.config.snr_db is {self.snr_db:g}: give a number from -{MAX_SNR_DB} to {MAX_SNR_DB}."
            )
        if self.num_units < 2:
            raise ConfigError(f"FeatureScores.config.num_units is {self.num_units}: give at least 2.")


class _Encoded(NamedTuple):
    """One utterance, encoded twice."""

    row: int
    clean: NDArray[np.float32]
    """Shape (layers, enc_frames, dim)."""

    noisy: NDArray[np.float32]


def score_names(layers: Sequence[int], others: Sequence[Context] = ()) -> list[str]:
    """Returns the names of the scores of layers, in the order of `score_features`.

    Args:
        layers: Numbers of the encoder outputs.
        others: Further attention contexts that are scored, such as (70, 6), whose names end in `_70_6`.
    """
    names = [f"{score}_layer{layer}" for layer in layers for score in _LAYER_SCORES]
    names += [f"{score}_tokens" for score in _TOKEN_SCORES]
    return names + [f"{name}_{context_name(context)}" for context in others for name in names]


def score_features(
    model: NestNetwork,
    corpus: Corpus,
    noise: Corpus | None = None,
    config: FeatureScoreConfig | None = None,
    context: Context | None = None,
) -> dict[str, float]:
    """Scores layers of an encoder on held-out audio, on the CPU; equal weights and audio give equal scores.

    Args:
        model: A network in eval mode, on the CPU.
        corpus: Held-out speech.
        noise: Noise for the noisy audio; None takes white noise.
        config: What is scored.
        context: Attention context of the encoder, one of `att_context_size`; by default the first of them.

    Returns:
        Scores by name, for each layer: `rankme` (see `rankme`), `pnmi` (information of the layer's clusters about
        acoustic units, see `ClusterScore`), `agreement` (share of the frames whose cluster is the same in clean and in
        noisy audio) and `kappa` (the same, corrected for chance); and the last two for the tokens that the decoder
        predicts from the last layer.

    Raises:
        ConfigError: A layer or the context does not exist, or a corpus has another sampling rate than the model.
        ProbeError: The audio has too few frames.
    """
    config = config or FeatureScoreConfig()
    rate, factor = model.config.features.sampling_rate, model.config.encoder.subsampling_factor
    check_rate(corpus, rate)
    if noise is not None:
        check_rate(noise, rate)
    last = model.config.encoder.num_layers
    layers = resolve_layers(config.layers, last)
    outputs = list(dict.fromkeys([*layers, last]))
    rows = _drawn_rows(corpus, config.seconds)
    encode = layer_function(model, outputs, context)
    encoded = _encode(encode, corpus, NoiseSampler(noise), rows, config.snr_db)
    # By the place of the utterance, so that one that cannot be encoded does not exchange the sides of all others.
    place = {row: number for number, row in enumerate(rows)}
    sides = [[utterance for utterance in encoded if place[utterance.row] % 2 == side] for side in (0, 1)]
    if min(sum(utterance.clean.shape[1] for utterance in side) for side in sides) < config.num_units:
        raise ProbeError(
            f"{corpus.path}: the drawn audio has too few frames for {config.num_units} units. Raise "
            "FeatureScores.config.seconds, lower num_units, or take a longer validation corpus."
        )
    compute = log_mel_function(model)
    fit_mels, mels = (
        iterate_corpus(model, corpus, compute, device="cpu", rows=[utterance.row for utterance in side])
        for side in sides
    )
    _, by_row = mfcc_units(fit_mels, mels, config.num_units, factor, _SEED)
    units = np.concatenate([by_row[utterance.row] for utterance in sides[1]])
    found: list[float] = []
    for index, _ in enumerate(layers):
        fitted, clean = (np.concatenate([utterance.clean[index] for utterance in side]) for side in sides)
        clusters = unit_clusters(fitted, config.num_units, _SEED)
        of_clean = clusters.predict(clean)
        of_noisy = clusters.predict(np.concatenate([utterance.noisy[index] for utterance in sides[1]]))
        found += [
            rankme(np.concatenate([fitted, clean])),
            cluster_score(units, of_clean).normalised_information,
            float((of_clean == of_noisy).mean()),
            kappa(of_clean, of_noisy),
        ]
    index = outputs.index(last)
    of_clean = _tokens(model, np.concatenate([utterance.clean[index] for utterance in sides[1]]))
    of_noisy = _tokens(model, np.concatenate([utterance.noisy[index] for utterance in sides[1]]))
    by_codebook = [kappa(of_clean[:, book], of_noisy[:, book]) for book in range(of_clean.shape[1])]
    found += [float((of_clean == of_noisy).mean()), float(np.mean(by_codebook))]
    return dict(zip(score_names(layers), found, strict=True))


def rankme(features: Float[np.ndarray, "frames dim"]) -> float:
    """Returns the effective rank of features, from 1 to their dimension, in double precision.

    It is exp(-sum p log p) over p = s / sum(s), where s are the singular values of the matrix of frames, which are not
    centred. At most `MAX_RANK_FRAMES` frames count.

    Source: RankMe, arXiv:2210.02885, equations 1 and 2. Differs: p is not increased by 1e-7, and values of 0 count
    nothing.
    """
    if len(features) > MAX_RANK_FRAMES:
        generator = np.random.Generator(np.random.Philox(key=derive_key(_SEED, "rank frames")))
        features = features[np.sort(generator.choice(len(features), MAX_RANK_FRAMES, replace=False))]
    values = np.linalg.svd(features.astype(np.float64), compute_uv=False)
    shares = values[values > 0] / values.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def kappa(first: Numbers, second: Numbers) -> float:
    """Returns Cohen's kappa of two numberings of the same frames: 1 if they are equal, 0 for independent ones.

    It is (a - c) / (1 - c), with the share a of equal numbers and the share c that independent numberings with the same
    frequencies would have; 0 if c is 1, where a single number says nothing.
    """
    size = int(max(first.max(), second.max())) + 1
    shares = [np.bincount(units, minlength=size) / len(units) for units in (first, second)]
    by_chance = float(shares[0] @ shares[1])
    return (float((first == second).mean()) - by_chance) / (1 - by_chance) if by_chance < 1 else 0.0


def _drawn_rows(corpus: Corpus, seconds: float) -> list[int]:
    """Returns rows of a corpus in an order that is drawn by the ids of the cuts, until they last `seconds`."""
    in_order = sorted(range(len(corpus)), key=lambda row: derive_key(_SEED, f"feature scores/{corpus.line(row)['id']}"))
    ends = np.cumsum([corpus.num_samples_of(row) for row in in_order])
    num_needed = int(np.searchsorted(ends, seconds * corpus.sampling_rate)) + 1
    return in_order[:num_needed]


def _encode(
    encode: BatchFunction, corpus: Corpus, noise: NoiseSampler, rows: list[int], snr_db: float
) -> list[_Encoded]:
    """Encodes utterances, clean and with noise; those that cannot be read or encoded are left out."""
    device, encoded = torch.device("cpu"), []
    for row in rows:
        try:
            clean = corpus.load(row)[1]
        except AudioError:
            continue
        noisy = _with_noise(clean, noise, snr_db, StatelessRng(_SEED, f"score noise/{corpus.line(row)['id']}"))
        found = compute_batch([clean, noisy], corpus.sampling_rate, encode, device)
        values = [value for value in found if not isinstance(value, FeatureProblem)]
        if len(values) == 2:
            encoded.append(_Encoded(row, *values))
    return encoded


def _with_noise(
    clean: NDArray[np.float32], noise: NoiseSampler, snr_db: float, rng: StatelessRng
) -> NDArray[np.float32]:
    """Adds noise over the whole length of an utterance; white noise if there is no other."""
    span = noise.draw(len(clean), rng)
    added = rng.normal(len(clean)) if span.kind == "none" else np.resize(span.samples, len(clean))
    powers = [float(np.square(signal, dtype=np.float64).mean()) for signal in (clean, added)]
    gain = np.sqrt(powers[0] / powers[1] / 10 ** (snr_db / 10)) if powers[1] > 0 else 0.0
    return clean + np.float32(gain) * added


def _tokens(model: NestNetwork, features: NDArray[np.float32]) -> NDArray[np.int64]:
    """Returns the tokens that the decoder predicts from frames, shape (frames, codebooks)."""
    with torch.no_grad():
        return model.decoder.logits(torch.from_numpy(features)).argmax(dim=-2).numpy()
