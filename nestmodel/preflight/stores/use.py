"""Requests and bytes that a run takes from object stores. This module reads no audio."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from nestdata import BatchPlan, Corpora, Corpus, MixConfig
from nestmodel.preflight.measure.memory import gigabytes
from nestmodel.preflight.measure.store_speed import remote_member

_SAMPLE = 2000
"""Cuts of a corpus whose sizes are looked up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreUse:
    """Requests and bytes of an epoch, retries and repeated requests excluded."""

    requests: float
    num_bytes: float

    def __add__(self, other: "StoreUse") -> "StoreUse":
        return StoreUse(requests=self.requests + other.requests, num_bytes=self.num_bytes + other.num_bytes)

    def __mul__(self, factor: float) -> "StoreUse":
        return StoreUse(requests=factor * self.requests, num_bytes=factor * self.num_bytes)

    def text(self) -> str:
        """Returns requests and bytes."""
        return f"{self.requests:,.0f} requests, {gigabytes(self.num_bytes)}"


def rounded(number: float, digits: int) -> str:
    """Returns a number with `digits` significant digits, or with all digits before the point; without an exponent."""
    if number >= 10**digits:
        return f"{number:,.0f}"
    return f"{Decimal(f'{number:.{digits}g}'):f}"


def speech_use(corpora: Corpora, plan: BatchPlan) -> StoreUse:
    """Returns what the speech of an epoch takes, on average over epochs: one request for each cut in a store.

    The mean size is estimated from a sample of each corpus.
    """
    return sum(
        (
            _use_of(corpus) * (repeats * len(corpus))
            for corpus, repeats in zip(corpora.corpora, plan.repeats_per_epoch, strict=True)
        ),
        StoreUse(requests=0.0, num_bytes=0.0),
    )


def noise_use(noise: Corpus | None, mix: MixConfig, plan: BatchPlan, corpora: Corpora) -> StoreUse:
    """Returns what the noise of an epoch takes, on average: one request for each cut that receives noise."""
    if noise is None or not len(noise):
        return StoreUse(requests=0.0, num_bytes=0.0)
    num_cuts = sum(
        repeats * len(corpus) for corpus, repeats in zip(corpora.corpora, plan.repeats_per_epoch, strict=True)
    )
    return _use_of(noise) * (num_cuts * mix.prob * mix.noise_ratio)


def _use_of(corpus: Corpus) -> StoreUse:
    """Returns what a cut takes on average."""
    if corpus.has_bank or not corpus.is_remote:
        return StoreUse(requests=0.0, num_bytes=0.0)
    indices: Sequence[int] = range(len(corpus))
    if len(corpus) > _SAMPLE:
        indices = random.Random(0).sample(indices, _SAMPLE)
    single = Corpora([corpus])
    members = [member for index in indices if (member := remote_member(single, index)) is not None]
    return StoreUse(
        requests=len(members) / len(indices),
        num_bytes=sum(member.address.length for member in members) / len(indices),
    )
