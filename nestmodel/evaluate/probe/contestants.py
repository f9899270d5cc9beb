"""The features that probes compare, those of the trained encoder and of two baselines, and their cache.

A cache has the features of many utterances in one file, which probes read again and again. The file is memory-mapped:
it stays in memory if there is enough of it, and is read from disk otherwise.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from nestmodel.evaluate.features.batch import BatchFunction, layer_function, stacked_mel_function
from nestmodel.evaluate.features.encode import Utterance
from nestmodel.evaluate.probe_config import Contestant
from nestmodel.nn.network import NestNetwork

CONTESTANTS: tuple[Contestant, ...] = get_args(Contestant)

_LARGEST = float(np.finfo(np.float16).max)


def frame_features(name: Contestant, model: NestNetwork, seed: int) -> tuple[NestNetwork, BatchFunction]:
    """Returns the network of a contestant, and the function that computes its features of encoder frames.

    The log-mels are those that both encoders read: normalised, and stacked to encoder frames.

    Args:
        name: The contestant.
        model: The trained network.
        seed: Determines the weights of the untrained encoder.
    """
    if name == "log_mel":
        return model, stacked_mel_function(model)
    network = NestNetwork(replace(model.config, seed=seed)) if name == "untrained" else model
    return network, layer_function(network, "all")


def contestant_name(name: Contestant) -> str:
    """Returns the name of a contestant in tables."""
    return name.replace("_", "-")


class FeatureCache:
    """Frames of utterances in float16, all layers of a frame side by side. Utterances have their indices of a corpus.

    Args:
        frames: Frames of all utterances, shape (frames, layers, dim).
        spans: First frame and end of each utterance, by its index.
    """

    def __init__(self, frames: NDArray[np.float16], spans: dict[int, tuple[int, int]]) -> None:
        self._frames = frames
        self._spans = spans

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers, and dimension."""
        _, num_layers, dim = self._frames.shape
        return num_layers, dim

    @classmethod
    def write(cls, path: Path, utterances: Iterable[Utterance]) -> "FeatureCache":
        """Writes the features of utterances to a file. Values beyond the range of float16 are clipped."""
        spans: dict[int, tuple[int, int]] = {}
        shape, num_frames = (0, 0), 0
        with path.open("wb") as file:
            for utterance in utterances:
                frames = utterance.values.transpose(1, 0, 2)  # (layers, frames, dim) -> (frames, layers, dim)
                file.write(np.ascontiguousarray(frames.clip(-_LARGEST, _LARGEST), np.float16).tobytes())
                spans[utterance.row] = (num_frames, num_frames + len(frames))
                num_frames += len(frames)
                shape = (frames.shape[1], frames.shape[2])
        if num_frames == 0:
            return cls(np.empty((0, *shape), np.float16), spans)
        return cls(np.memmap(path, np.float16, "r", shape=(num_frames, *shape)), spans)

    def __contains__(self, row: object) -> bool:
        """Returns whether the utterance with an index has features."""
        return row in self._spans

    def num_frames(self, row: int) -> int:
        """Returns the number of frames of an utterance."""
        start, end = self._spans[row]
        return end - start

    def read(self, row: int) -> Float[Tensor, "frames layers dim"]:
        """Returns the frames of an utterance in float32."""
        start, end = self._spans[row]
        return torch.from_numpy(self._frames[start:end].astype(np.float32))

    def statistics(self, rows: Sequence[int]) -> tuple[Float[Tensor, "layers dim"], Float[Tensor, "layers dim"]]:
        """Returns the mean and the standard deviation of each dimension over the frames of utterances."""
        num_frames = 0
        total, squares = torch.zeros(self.shape, dtype=torch.float64), torch.zeros(self.shape, dtype=torch.float64)
        for row in rows:
            frames = self.read(row).double()
            num_frames += len(frames)
            total += frames.sum(dim=0)
            squares += frames.square().sum(dim=0)
        mean = total / num_frames
        variance = (squares / num_frames - mean.square()).clamp(min=0)
        return mean.float(), variance.sqrt().float()


class Caches(NamedTuple):
    """Features of one contestant."""

    training: FeatureCache
    test: FeatureCache
