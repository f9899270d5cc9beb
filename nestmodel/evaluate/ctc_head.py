"""A CTC head on frozen features: learned weights of the layers, one linear map, greedy decoding; and its training.

A hidden layer may stand before the linear map.

All feature sets are trained by the same rule: Adam with a learning rate that falls linearly to 0, epochs in a keyed
order, and an early end when the character error rate of the held-out utterances has not improved for some epochs. The
weights of the best epoch are kept.

An encoder's frames may be 80 ms long, longer than a character of fast speech, and CTC writes at most one character per
frame. The head therefore predicts several labels from each frame, in the order of time (`labels_per_frame`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nestdata import derive_key
from nestdata.stateless_rng import StatelessRng
from nestmodel.evaluate.error_rates import count_errors
from nestmodel.evaluate.feature_cache import FeatureCache
from nestmodel.evaluate.text import BLANK, Alphabet

UTTERANCES_PER_STEP = 16
"""Number of utterances of an optimizer step."""

MAX_GRADIENT_NORM = 1.0
"""Gradients are clipped to this norm."""

MIN_LABEL_RATE_HZ = 25.0
"""Minimum number of labels per second by default. Speech has fewer characters per second (docs/probes.md)."""

_STD_OFFSET = 1e-5  # added to standard deviations, which are divisors and zero for a constant dimension


@dataclass(frozen=True, kw_only=True, slots=True)
class StoppingRule:
    """When the training of a head ends."""

    max_epochs: int
    """Maximum number of passes over the training utterances, at the end of which the learning rate is 0."""

    patience: int
    """Training ends when the held-out error rate has not improved for this number of epochs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedHead:
    """A head with the weights of its best epoch, and how it was trained."""

    head: "CtcHead"
    learning_rate: float

    error_rate: float
    """Character error rate of the held-out utterances after the best epoch."""

    best_epoch: int
    """Number of the best epoch, from 1."""

    num_epochs: int
    """Number of epochs until the training ended."""

    num_steps: int
    """Number of optimizer steps until the training ended."""


class CtcHead(nn.Module):
    """Standardises each layer, adds the layers up with learned weights, and predicts labels by a linear map.

    Args:
        mean: Mean of each dimension of each layer over the training frames.
        std: Standard deviation of the same.
        num_labels: Number of characters and the blank.
        labels_per_frame: Number of labels that are predicted from each frame.
        seed: Determines the initial weights of the head. The layers have equal weights at first.
        hidden: Width of a hidden layer with ReLU before the linear map; None has no hidden layer.
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
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        self.num_labels, self.labels_per_frame = num_labels, labels_per_frame
        self.register_buffer("mean", mean)
        self.register_buffer("scale", 1 / (std + _STD_OFFSET))
        self.layer_scores = nn.Parameter(torch.zeros(mean.shape[0]))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_key(seed, "probe ctc weights"))
            self.hidden = None if hidden is None else nn.Linear(mean.shape[1], hidden)
            self.linear = nn.Linear(hidden or mean.shape[1], num_labels * labels_per_frame)

    @property
    def layer_weights(self) -> Float[Tensor, " layers"]:
        """Weights of the layers; their sum is 1."""
        return self.layer_scores.softmax(dim=0)

    def forward(self, layers: Float[Tensor, "frames layers dim"]) -> Float[Tensor, "label_frames labels"]:
        """Returns log probabilities, `labels_per_frame` rows for each frame, in the order of time."""
        standardised = (layers - self.mean) * self.scale
        features = torch.einsum("fld,l->fd", standardised, self.layer_weights)
        if self.hidden is not None:
            features = F.relu(self.hidden(features))
        logits: Tensor = self.linear(features)
        return logits.view(-1, self.num_labels).log_softmax(dim=1)


def fit_head(
    cache: FeatureCache,
    texts: Mapping[int, str],
    alphabet: Alphabet,
    training: Sequence[int],
    held_out: Sequence[int],
    *,
    labels_per_frame: int,
    learning_rate: float,
    rule: StoppingRule,
    seed: int,
    hidden: int | None = None,
) -> TrainedHead:
    """Trains a head until the error rate of the held-out utterances no longer improves.

    Args:
        cache: Features of the utterances.
        texts: Normalised text of each utterance.
        alphabet: Contains the characters of all texts.
        training: Utterances to train on; each has enough frames for its text.
        held_out: Utterances whose error rate ends the training and selects the epoch.
        labels_per_frame: Number of labels that are predicted from each frame.
        learning_rate: Of Adam, at the first step.
        rule: When the training ends.
        seed: Determines the initial weights and the order of the utterances.
        hidden: Width of the hidden layer of the head; None has none.
    """
    head = CtcHead(*cache.statistics(training), len(alphabet), labels_per_frame, seed, hidden)
    optimizer = torch.optim.Adam(head.parameters(), lr=learning_rate)
    total_steps = rule.max_epochs * math.ceil(len(training) / UTTERANCES_PER_STEP)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_steps)
    references = [texts[row] for row in held_out]
    best = _Best(float("inf"), 0, {})
    num_steps = epoch = 0
    while epoch < rule.max_epochs and epoch - best.epoch < rule.patience:
        epoch += 1
        for batch in _shuffled_batches(cache, training, seed, epoch):
            loss, length = _ctc_loss(head, cache, [alphabet.encode(texts[row]) for row in batch], batch)
            optimizer.zero_grad()
            (loss / length).backward()
            nn.utils.clip_grad_norm_(head.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
            schedule.step()
            num_steps += 1
        counts = count_errors(references, transcribe(head, cache, alphabet, held_out), "characters")
        rate = float(counts.errors.sum() / counts.num_reference.sum())
        if rate < best.error_rate:
            state = {name: values.clone() for name, values in head.state_dict().items()}
            best = _Best(rate, epoch, state)
    head.load_state_dict(best.state)
    return TrainedHead(
        head=head.eval(),
        learning_rate=learning_rate,
        error_rate=best.error_rate,
        best_epoch=best.epoch,
        num_epochs=epoch,
        num_steps=num_steps,
    )


@torch.no_grad()
def transcribe(head: CtcHead, cache: FeatureCache, alphabet: Alphabet, rows: Sequence[int]) -> list[str]:
    """Returns the greedy transcript of each utterance."""
    return [alphabet.decode(head(cache.read(row)).argmax(dim=1).tolist()) for row in rows]


def default_labels_per_frame(frame_rate_hz: float) -> int:
    """Returns the smallest number of labels per encoder frame that gives `MIN_LABEL_RATE_HZ`."""
    return math.ceil(MIN_LABEL_RATE_HZ / frame_rate_hz)


def fits(text: str, num_label_frames: int) -> bool:
    """Returns whether CTC can write a text: it needs a label frame for each character, and a blank between repeats."""
    return len(text) + sum(one == other for one, other in pairwise(text)) <= num_label_frames


@dataclass(frozen=True, slots=True)
class _Best:
    error_rate: float
    epoch: int
    state: dict[str, Tensor]


def _ctc_loss(
    head: CtcHead, cache: FeatureCache, targets: Sequence[list[int]], batch: Sequence[int]
) -> tuple[Tensor, int]:
    """Returns the sum of the losses of the utterances of a batch, in nats, and the number of their characters."""
    log_probs = head(torch.cat([cache.read(row) for row in batch]))
    input_lens: Int[Tensor, " batch"] = torch.tensor([cache.num_frames(row) for row in batch]) * head.labels_per_frame
    target_lens = torch.tensor([len(labels) for labels in targets])
    loss = F.ctc_loss(
        nn.utils.rnn.pad_sequence(log_probs.split(input_lens.tolist())),  # (label_frames, batch, labels)
        torch.tensor([label for labels in targets for label in labels]),
        input_lens,
        target_lens,
        blank=BLANK,
        reduction="sum",
    )
    return loss, int(target_lens.sum())


def _shuffled_batches(cache: FeatureCache, rows: Sequence[int], seed: int, epoch: int) -> Iterator[Sequence[int]]:
    """Yields batches of utterances of similar length, in an order that is drawn for each epoch."""
    in_order = sorted(rows, key=lambda row: (cache.num_frames(row), row))
    starts = range(0, len(in_order), UTTERANCES_PER_STEP)
    for i in StatelessRng(seed, "probe ctc order", epoch).distinct(len(starts), len(starts)):
        yield in_order[starts[i] : starts[i] + UTTERANCES_PER_STEP]
