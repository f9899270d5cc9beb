"""Acoustic units of encoder frames: k-means clusters of MFCCs, from which no person has to label anything.

Source: HuBERT, arXiv:2106.07447, first iteration: 13 MFCCs with first and second differences, 100 clusters. Differs:
the MFCCs are computed from the model's own log-mel energies; the unit of an encoder frame is the most frequent one of
its 10 ms frames. scikit-learn belongs to the extra `probe`.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from nestdata import derive_key
from nestmodel.errors import ConfigError
from nestmodel.evaluate.features.encode import Utterance

NUM_MFCCS = 13
MAX_FITTED_FRAMES = 300_000
"""Clusters are fitted to at most this number of frames, which are drawn by a key."""

_BATCH_FRAMES = 4096

Numbers = NDArray[np.int32] | NDArray[np.int64]
"""Numbers of units or clusters by frame; scikit-learn returns 32 bits. beartype 0.19 does not know `np.integer`."""


class ClusterScore(NamedTuple):
    """Agreement of clusters with units, over frames."""

    normalised_information: float
    """Mutual information of unit and cluster over the entropy of the units, in [0, 1]: the phone-normalised mutual
    information (PNMI) of HuBERT, with units in the place of phones."""

    purity: float
    """Share of the frames whose unit is the most frequent one of their cluster."""


def mfccs(log_mels: Float[Tensor, "frames mels"]) -> Float[Tensor, "frames coefficients"]:
    """Returns 13 MFCCs of log-mel frames, and their first and second differences over time, 39 values per frame."""
    from torchaudio.functional import compute_deltas, create_dct

    basis = create_dct(NUM_MFCCS, log_mels.shape[1], norm="ortho")
    static = (log_mels @ basis).T  # (coefficients, frames)
    first = compute_deltas(static)
    return torch.cat([static, first, compute_deltas(first)]).T


def unit_clusters(frames: NDArray[np.float32], num_units: int, seed: int) -> Any:
    """Returns scikit-learn's k-means model of frames, shape (frames, dim)."""
    from sklearn.cluster import MiniBatchKMeans

    key = derive_key(seed, "probe units")
    if len(frames) > MAX_FITTED_FRAMES:
        generator = np.random.Generator(np.random.Philox(key=key))
        frames = frames[np.sort(generator.choice(len(frames), MAX_FITTED_FRAMES, replace=False))]
    clusters = MiniBatchKMeans(num_units, batch_size=_BATCH_FRAMES, n_init=3, random_state=key % 2**32)
    return clusters.fit(frames)


def mfcc_units(
    training: Iterator[Utterance], test: Iterator[Utterance], num_units: int, frames_per_unit: int, seed: int
) -> tuple[dict[int, NDArray[np.int64]], dict[int, NDArray[np.int64]]]:
    """Returns the units of the encoder frames of training and test utterances, by index.

    Args:
        training: Log-mel frames before normalisation, to which the clusters are fitted.
        test: The same of test utterances.
        num_units: Number of clusters.
        frames_per_unit: Number of log-mel frames of an encoder frame; the last one may have fewer.
        seed: Determines the clusters.
    """
    coefficients = [
        {utterance.row: mfccs(torch.from_numpy(utterance.values[0])).numpy() for utterance in utterances}
        for utterances in (training, test)
    ]
    in_order = [coefficients[0][row] for row in sorted(coefficients[0])]
    clusters = unit_clusters(np.concatenate(in_order), num_units, seed)
    training_units, test_units = (
        {row: majority(clusters.predict(frames), frames_per_unit) for row, frames in by_row.items()}
        for by_row in coefficients
    )
    return training_units, test_units


def majority(units: Numbers, group: int) -> NDArray[np.int64]:
    """Returns the most frequent unit of each group of consecutive frames; the earliest one of several."""
    groups = [units[start : start + group] for start in range(0, len(units), group)]
    return np.array([group[np.bincount(group)[group].argmax()] for group in groups], np.int64)


def cluster_score(units: NDArray[np.int64], clusters: Numbers) -> ClusterScore:
    """Returns the agreement of two numberings of the same frames."""
    counts = np.zeros((int(units.max()) + 1, int(clusters.max()) + 1))
    np.add.at(counts, (units, clusters), 1)
    joint = counts / counts.sum()
    of_units, of_clusters = joint.sum(axis=1, keepdims=True), joint.sum(axis=0, keepdims=True)
    independent = (of_units * of_clusters)[joint > 0]
    information = float((joint[joint > 0] * np.log(joint[joint > 0] / independent)).sum())
    entropy = -float((of_units[of_units > 0] * np.log(of_units[of_units > 0])).sum())
    return ClusterScore(information / entropy if entropy else 1.0, float(joint.max(axis=0).sum()))


def check_sklearn(what: str = "a probe") -> None:
    """Raises ConfigError if scikit-learn is not installed."""
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError(f"{what} needs scikit-learn: pip install 'nest-pretrain[probe]'.")
