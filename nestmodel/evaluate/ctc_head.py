"""A CTC head on frozen features: learned weights of the layers, one linear map, greedy decoding; and its training.

Heads read the features from a file. They are trained by Adam, with a learning rate that falls linearly to 0
and epochs in a keyed order; the weights of the epoch with the lowest character error rate on held-out utterances are
kept.

An encoder's frames may be 80 ms long, longer than a character of fast speech, and CTC writes at most one character per
frame. The head therefore predicts several labels from each frame, in the order of time (`labels_per_frame`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from nestdata import derive_key
from nestdata.stateless_rng import StatelessRng
from nestmodel.evaluate.encode import Utterance
from nestmodel.evaluate.error_rates import count_errors
from nestmodel.evaluate.text import BLANK, Alphabet
from nestmodel.evaluate.utterances import ProbeUtterance

UTTERANCES_PER_STEP = 16
"""Number of utterances of an optimizer step."""

MAX_GRADIENT_NORM = 1.0
"""Gradients are clipped to this norm."""

MIN_LABEL_RATE_HZ = 25.0
"""Minimum number of labels per second. Speech has fewer characters per second (docs/probes.md)."""

_LARGEST = float(np.finfo(np.float16).max)
_STD_OFFSET = 1e-5  # added to standard deviations, which are divisors and zero for a constant dimension


Features = Mapping[int, NDArray[np.float16]]
"""Frames of utterances by their indices of a corpus, all layers of a frame side by side: (frames, layers, dim)."""


def write_features(path: Path, utterances: Iterable[Utterance]) -> Features:
    """Writes the features of utterances to a file, and returns views of it. Values beyond float16 are clipped.

    The file is memory-mapped: it stays in memory if there is enough of it, and is read from disk otherwise.
    """
    lens: dict[int, int] = {}
    shape: tuple[int, ...] = ()
    with path.open("wb") as file:
        for utterance in utterances:
            frames = utterance.values.transpose(1, 0, 2)  # (layers, frames, dim) -> (frames, layers, dim)
            file.write(np.ascontiguousarray(frames.clip(-_LARGEST, _LARGEST), np.float16).tobytes())
            lens[utterance.row], shape = len(frames), frames.shape[1:]
    if not lens:
        return {}
    ends = np.cumsum(list(lens.values()))
    whole = np.memmap(path, np.float16, "r", shape=(int(ends[-1]), *shape))
    return dict(zip(lens, np.split(whole, ends[:-1]), strict=True))


def _read(features: Features, row: int) -> Float[Tensor, "frames layers dim"]:
    """Returns the frames of an utterance in float32."""
    return torch.from_numpy(features[row].astype(np.float32))


def _statistics(
    features: Features, rows: Sequence[int]
) -> tuple[Float[Tensor, "layers dim"], Float[Tensor, "layers dim"]]:
    """Returns the mean and the standard deviation of each dimension over the frames of utterances."""
    num_frames = sum(len(features[row]) for row in rows)
    total, squares = torch.zeros(2, *features[rows[0]].shape[1:], dtype=torch.float64)
    for row in rows:
        frames = _read(features, row).double()
        total += frames.sum(dim=0)
        squares += frames.square().sum(dim=0)
    mean = total / num_frames
    variance = (squares / num_frames - mean.square()).clamp(min=0)
    return mean.float(), variance.sqrt().float()


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadTask:
    """The texts that heads learn to write, the same for all features."""

    texts: dict[int, str]
    """Normalised text of each utterance, by its index."""

    alphabet: Alphabet
    """The characters of all texts."""

    training: list[int]
    """Utterances to train on."""

    held_out: list[int]
    """Utterances whose error rate selects the epoch."""

    labels_per_frame: int
    """Number of labels that heads predict from each frame."""


class CtcHead(nn.Module):
    """Standardises each layer, adds the layers up with learned weights, and predicts labels by a linear map.

    Args:
        mean: Mean of each dimension of each layer over the training frames.
        std: Standard deviation of the same.
        num_labels: Number of characters and the blank.
        labels_per_frame: Number of labels that are predicted from each frame.
        seed: Determines the initial weights of the head. The layers have equal weights at first.
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        mean: Float[Tensor, "layers dim"],
        std: Float[Tensor, "layers dim"],
        num_labels: int,
        labels_per_frame: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.num_labels, self.labels_per_frame = num_labels, labels_per_frame
        self.register_buffer("mean", mean)
        self.register_buffer("scale", 1 / (std + _STD_OFFSET))
        self.layer_scores = nn.Parameter(torch.zeros(mean.shape[0]))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_key(seed, "probe ctc weights"))
            self.linear = nn.Linear(mean.shape[1], num_labels * labels_per_frame)

    @property
    def layer_weights(self) -> Float[Tensor, " layers"]:
        """Weights of the layers; their sum is 1."""
        return self.layer_scores.softmax(dim=0)

    def forward(self, layers: Float[Tensor, "frames layers dim"]) -> Float[Tensor, "label_frames labels"]:
        """Returns log probabilities, `labels_per_frame` rows for each frame, in the order of time."""
        standardised = (layers - self.mean) * self.scale
        features = torch.einsum("fld,l->fd", standardised, self.layer_weights)
        logits: Tensor = self.linear(features)
        return logits.view(-1, self.num_labels).log_softmax(dim=1)


def fit_head(
    features: Features, task: HeadTask, *, learning_rate: float, max_epochs: int, seed: int
) -> tuple[CtcHead, float]:
    """Returns a head with the weights of the epoch with the lowest held-out character error rate, and that rate.

    Args:
        features: Features of the utterances.
        task: The utterances and their texts.
        learning_rate: Learning rate of Adam at the first step.
        max_epochs: Number of epochs, at the end of which the learning rate is 0.
        seed: Determines the initial weights and the order of the utterances.
    """
    head = CtcHead(*_statistics(features, task.training), len(task.alphabet), task.labels_per_frame, seed)
    references = [task.texts[row] for row in task.held_out]
    num_steps = max_epochs * math.ceil(len(task.training) / UTTERANCES_PER_STEP)
    optimizer = torch.optim.Adam(head.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_steps)
    lowest, best = math.inf, head.state_dict()
    for epoch in range(1, max_epochs + 1):
        for batch in _shuffled_batches(features, task.training, seed, epoch):
            loss = _ctc_loss(head, features, [task.alphabet.encode(task.texts[row]) for row in batch], batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
            schedule.step()
        counts = count_errors(references, transcribe(head, features, task.alphabet, task.held_out), "characters")
        error = float(counts.errors.sum() / counts.num_reference.sum())
        if error < lowest:
            lowest = error
            best = {name: values.clone() for name, values in head.state_dict().items()}
    head.load_state_dict(best)
    return head.eval(), lowest


@torch.no_grad()
def transcribe(head: CtcHead, features: Features, alphabet: Alphabet, rows: Sequence[int]) -> list[str]:
    """Returns the greedy transcript of each utterance."""
    return [alphabet.decode(head(_read(features, row)).argmax(dim=1).tolist()) for row in rows]


def num_labels_per_frame(frame_rate_hz: float) -> int:
    """Returns the smallest number of labels per encoder frame that gives `MIN_LABEL_RATE_HZ`."""
    return math.ceil(MIN_LABEL_RATE_HZ / frame_rate_hz)


def fits(text: str, num_label_frames: int) -> bool:
    """Returns whether CTC can write a text: it needs a label frame for each character, and a blank between repeats."""
    return len(text) + sum(one == other for one, other in pairwise(text)) <= num_label_frames


def writable(utterances: Iterable[ProbeUtterance], features: Features, labels_per_frame: int) -> list[ProbeUtterance]:
    """Returns the utterances whose text CTC can write with its frames."""
    return [
        utterance for utterance in utterances if fits(utterance.target, len(features[utterance.row]) * labels_per_frame)
    ]


def _ctc_loss(head: CtcHead, features: Features, targets: Sequence[list[int]], batch: Sequence[int]) -> Tensor:
    """Returns the loss of the utterances of a batch, in nats per character."""
    log_probs = head(torch.cat([_read(features, row) for row in batch]))
    input_lens: Int[Tensor, " batch"] = torch.tensor([len(features[row]) for row in batch]) * head.labels_per_frame
    target_lens = torch.tensor([len(labels) for labels in targets])
    loss = F.ctc_loss(
        nn.utils.rnn.pad_sequence(log_probs.split(input_lens.tolist())),  # (label_frames, batch, labels)
        torch.tensor([label for labels in targets for label in labels]),
        input_lens,
        target_lens,
        blank=BLANK,
        reduction="sum",
    )
    return loss / int(target_lens.sum())


def _shuffled_batches(features: Features, rows: Sequence[int], seed: int, epoch: int) -> Iterator[Sequence[int]]:
    """Yields batches of utterances of similar length, in an order that is drawn for each epoch."""
    in_order = sorted(rows, key=lambda row: (len(features[row]), row))
    starts = range(0, len(in_order), UTTERANCES_PER_STEP)
    for i in StatelessRng(seed, "probe ctc order", epoch).distinct(len(starts), len(starts)):
        yield in_order[starts[i] : starts[i] + UTTERANCES_PER_STEP]
