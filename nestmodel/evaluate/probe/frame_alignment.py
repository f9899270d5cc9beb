"""Characters of encoder frames, by forced alignment of the transcripts.

The alignment is that of three CTC heads, one for each contestant, whose probabilities are averaged: no contestant is
scored against an alignment of its own. CTC writes a character at one frame and blanks around it; a frame with a blank
gets the nearest character. If an encoder frame has two characters, it gets the first one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from nestmodel.evaluate.features.rejects import RejectedUtterance
from nestmodel.evaluate.frame_units import majority
from nestmodel.evaluate.probe.contestants import CONTESTANTS, Caches, FeatureCache
from nestmodel.evaluate.probe.ctc_head import CtcHead, HeadTask, fit_head, writable
from nestmodel.evaluate.probe.run import Side
from nestmodel.evaluate.probe.training import StoppingRule
from nestmodel.evaluate.probe.utterances import in_all
from nestmodel.evaluate.probe_config import Contestant
from nestmodel.evaluate.text import BLANK, Alphabet

LEARNING_RATE = 0.02
RULE = StoppingRule(max_epochs=30, patience=30)


class Units(NamedTuple):
    """Numbers of units by encoder frame, for each utterance by its index."""

    training: dict[int, NDArray[np.int64]]
    test: dict[int, NDArray[np.int64]]
    num_units: int
    alphabet: str | None = None
    """The characters, if they are the units; 0 is the first of them."""


def aligned_units(
    caches: Mapping[Contestant, Caches],
    training: Side,
    test: Side,
    *,
    labels_per_frame: int,
    held_out: float,
    seed: int,
) -> Units:
    """Trains a head for each contestant, and aligns the texts of both sides with the average of their probabilities.

    Utterances that cannot be aligned are added to the rejects of their side: those with more characters than label
    frames, and test utterances with characters outside the alphabet.

    Args:
        caches: Features of all contestants.
        training: Utterances with text to train the heads on, and to align.
        test: Utterances with text to align.
        labels_per_frame: Number of labels that the heads predict from each frame.
        held_out: Share of the training utterances that ends the training of the heads.
        seed: Determines the split and the heads.
    """
    usable = in_all(training.utterances, [each.training for each in caches.values()])
    task = HeadTask.of(
        writable(usable, caches["trained"].training, labels_per_frame),
        labels_per_frame=labels_per_frame,
        held_out=held_out,
        seed=seed,
    )
    heads = {
        name: fit_head(caches[name].training, task, learning_rate=LEARNING_RATE, rule=RULE, seed=seed).head
        for name in CONTESTANTS
    }
    return Units(
        training=_align_side(heads, {name: caches[name].training for name in CONTESTANTS}, training, task.alphabet),
        test=_align_side(heads, {name: caches[name].test for name in CONTESTANTS}, test, task.alphabet),
        num_units=len(task.alphabet.characters),
        alphabet=task.alphabet.characters,
    )


def align(log_probs: Float[Tensor, "label_frames labels"], labels: Sequence[int]) -> NDArray[np.int64]:
    """Returns the character of each label frame on the most likely path of CTC that writes `labels`, from 0."""
    from torchaudio.functional import forced_align

    path = forced_align(log_probs.unsqueeze(0), torch.tensor([list(labels)], dtype=torch.int32), blank=BLANK)[0][0]
    written: NDArray[np.int64] = path.numpy().astype(np.int64)
    spoken = np.flatnonzero(written != BLANK)
    nearest = np.abs(np.arange(len(written))[:, None] - spoken[None, :]).argmin(axis=1)
    characters: NDArray[np.int64] = written[spoken[nearest]] - 1
    return characters


@torch.no_grad()
def _align_side(
    heads: Mapping[Contestant, CtcHead], caches: Mapping[Contestant, FeatureCache], side: Side, alphabet: Alphabet
) -> dict[int, NDArray[np.int64]]:
    found, labels_per_frame = {}, heads["trained"].labels_per_frame
    for utterance in in_all(side.utterances, list(caches.values())):
        if alphabet.count_unknown([utterance.target]) or not writable([utterance], caches["trained"], labels_per_frame):
            detail = f"{utterance.target!r} has too many characters for its frames, or characters outside the alphabet"
            side.rejects.add(RejectedUtterance("", utterance.cut_id, "not_aligned", detail))
            continue
        log_probs = torch.stack([heads[name](caches[name].read(utterance.row)) for name in CONTESTANTS])
        average = log_probs.logsumexp(dim=0) - math.log(len(CONTESTANTS))
        found[utterance.row] = majority(align(average, alphabet.encode(utterance.target)), labels_per_frame)
    return found
