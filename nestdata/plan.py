"""The plan: which cuts are in which microbatch of which optimizer step, as arithmetic on sorted lengths.

Nothing is materialised and nothing is remembered, so any step is reached at once and a batch depends on neither
the number of ranks nor the history of the run. All of it is integer arithmetic on sample counts. How it works is
told in `docs/how-a-batch-is-chosen.md`.
"""

import hashlib
import json
from bisect import bisect_right
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from nestdata.errors import ConfigError, PlanError
from nestdata.keyed import Permutation, derive_key

ALGORITHM_VERSION = 1
"""Goes into the fingerprint: bump it with any change to which cuts a step holds."""

# A bucket spans lengths down to 1 - 1/32 of its longest, so that padding stays under about 1.6 % on average.
_NARROW = 32
# Where that would leave a bucket with few groups, it may span 1 - 1/8 to gather four: with one group to a bucket,
# the same cuts would meet in the same step in every epoch.
_WIDE = 8
_WANTED_GROUPS = 4
# Repeats are drawn from this many times more cuts than they can be, so that no cut is repeated every epoch.
_FILLERS_PER_SLOT = 4


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How cuts are gathered into microbatches and optimizer steps."""

    max_batch_seconds: float = 240.0
    """Most seconds of audio in one microbatch, padding included."""

    microbatches_per_step: int = 8
    """Microbatches that make up one optimizer step over all ranks. Every world size that divides it gives the same
    optimizer steps."""

    min_audio_seconds: float = 1.0
    """Utterances shorter than this are lengthened to it before anything else."""

    seed: int = 0
    """Seed of the order of cuts, and of every random draw that is keyed by this plan."""

    def __post_init__(self) -> None:
        if self.max_batch_seconds <= 0:
            raise ConfigError(f"plan.max_batch_seconds is {self.max_batch_seconds}: give a positive number of seconds.")
        if self.microbatches_per_step < 1:
            raise ConfigError(f"plan.microbatches_per_step is {self.microbatches_per_step}: give at least 1.")
        if not 0 < self.min_audio_seconds <= self.max_batch_seconds:
            raise ConfigError(
                f"plan.min_audio_seconds is {self.min_audio_seconds}: expected more than 0 "
                f"and at most max_batch_seconds ({self.max_batch_seconds})."
            )


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of cuts of similar length; every microbatch taken from it has the same shape."""

    first_row: int
    """The shortest of its cuts, as a row of the corpus."""

    num_cuts: int
    """Cuts that the bucket owns."""

    num_fillers: int
    """The shortest cuts of the corpus, this many, from which slots that its own cuts do not fill are filled."""

    cuts_per_microbatch: int
    padded_samples: int
    """Length to which every microbatch of the bucket is padded: that of its longest cut."""

    first_group: int
    num_groups: int
    """Optimizer steps that the bucket fills in each epoch."""


class BatchPlan:
    """Cut rows of any (step, microbatch), in constant time.

    Steps count on past the epoch: `epoch = step // steps_per_epoch`, and each epoch has an order of its own. Within
    a step all microbatches have the same number of cuts and the same padded length. Over an epoch every cut is
    seen once, but for fewer than `microbatches_per_step` repeats of short ones that fill up one step; which ones
    they are changes with the epoch.

    Args:
        num_samples: Length of every cut in samples, ascending, shape (num_cuts,). May be memory-mapped.
        sampling_rate: Of those samples, in Hz.
        config: Budget, group size and seed.
        content: Fingerprint of what the rows stand for, such as `Corpus.fingerprint`. Without one, the
            plan's fingerprint is taken over all lengths.

    Raises:
        PlanError: There are no cuts, fewer cuts than microbatches in a step, or a cut longer than the budget.
    """

    def __init__(
        self, num_samples: NDArray[np.int64], sampling_rate: int, config: PlanConfig, *, content: str = ""
    ) -> None:
        self.config = config
        self.sampling_rate = sampling_rate
        self.min_samples = round(config.min_audio_seconds * sampling_rate)
        self.buckets = tuple(_lay_out(num_samples, sampling_rate, self.min_samples, config))
        self._first_groups = [bucket.first_group for bucket in self.buckets]
        self.steps_per_epoch = self.buckets[-1].first_group + self.buckets[-1].num_groups
        self.fingerprint = self._make_fingerprint(content.encode() or np.ascontiguousarray(num_samples).tobytes())
        """Names this plan: two plans with the same fingerprint give the same rows for every step."""

    def rows(self, step: int, microbatch: int) -> NDArray[np.int64]:
        """Returns the corpus rows of one microbatch, shape (cuts_per_microbatch,).

        Raises:
            IndexError: The step is negative or the microbatch is not in [0, microbatches_per_step).
        """
        if step < 0 or not 0 <= microbatch < self.config.microbatches_per_step:
            raise IndexError(
                f"step {step}, microbatch {microbatch}: steps start at 0 and microbatches lie in "
                f"[0, {self.config.microbatches_per_step})"
            )
        epoch, (number, group) = self.epoch(step), self._locate(step)
        bucket = self.buckets[number]
        size = bucket.cuts_per_microbatch
        start = (group * self.config.microbatches_per_step + microbatch) * size
        slots = np.arange(start, start + size, dtype=np.int64)
        own, fill = slots[slots < bucket.num_cuts], slots[slots >= bucket.num_cuts] - bucket.num_cuts
        rows = bucket.first_row + self._permutation("cuts", epoch, number, bucket.num_cuts)(own)
        if fill.size:
            rows = np.concatenate([rows, self._permutation("fillers", epoch, number, bucket.num_fillers)(fill)])
        return rows

    def epoch(self, step: int) -> int:
        """Returns the epoch that a step belongs to, counted from 0."""
        return step // self.steps_per_epoch

    def padded_samples(self, step: int) -> int:
        """Returns the length in samples to which every microbatch of a step is padded."""
        return self.buckets[self._locate(step)[0]].padded_samples

    def microbatches_of(self, rank: int, world_size: int) -> range:
        """Returns the microbatches of every step that one rank takes.

        Raises:
            ConfigError: The world size does not divide the microbatches of a step, or there is no such rank.
        """
        total = self.config.microbatches_per_step
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} does not exist among {world_size} ranks: they are counted from 0.")
        if total % world_size:
            divisors = [n for n in range(1, total + 1) if total % n == 0]
            raise ConfigError(
                f"plan.microbatches_per_step is {total}, which {world_size} ranks cannot share evenly: run with "
                f"{', '.join(map(str, divisors))} ranks, or start a new run with a multiple of {world_size}."
            )
        share = total // world_size
        return range(rank * share, (rank + 1) * share)

    def _make_fingerprint(self, content: bytes) -> str:
        # 240 and 240.0 seconds are one setting, but not one text.
        settings = {name: float(v) if name.endswith("_seconds") else v for name, v in asdict(self.config).items()}
        settings |= {"sampling_rate": self.sampling_rate, "version": ALGORITHM_VERSION}
        return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode() + content, digest_size=16).hexdigest()

    def _locate(self, step: int) -> tuple[int, int]:
        """Returns the bucket of a step and the group within it."""
        epoch = self.epoch(step)
        order = self._permutation("groups", epoch, 0, self.steps_per_epoch)
        position = int(order(np.array([step % self.steps_per_epoch]))[0])
        number = bisect_right(self._first_groups, position) - 1
        return number, position - self._first_groups[number]

    def _permutation(self, purpose: str, epoch: int, bucket: int, size: int) -> Permutation:
        return Permutation(size, derive_key(self.config.seed, purpose, epoch, bucket))


def _lay_out(num_samples: NDArray[np.int64], rate: int, min_samples: int, config: PlanConfig) -> list[Bucket]:
    """Walks from the longest cut down and gives every bucket a whole number of groups."""
    budget = round(config.max_batch_seconds * rate)
    microbatches = config.microbatches_per_step
    _check_fits(num_samples, rate, budget, microbatches)
    buckets = []
    groups_so_far = 0
    end = len(num_samples)
    while end > 0:
        longest = max(int(num_samples[end - 1]), min_samples)
        size = budget // longest
        group = microbatches * size
        num_fillers = 0
        if end < group:  # what is left fills one smaller group
            size, num_groups, num_cuts = -(-end // microbatches), 1, end
            if end % microbatches:
                # Where the corpus is small, so many of the shortest cuts may reach into those that do not fit.
                num_fitting = int(np.searchsorted(num_samples, budget // size, side="right"))
                num_fillers = min(num_fitting, _FILLERS_PER_SLOT * microbatches)
                longest = max(longest, int(num_samples[num_fillers - 1]))
        else:
            # Cuts short enough for one more to fit into a microbatch belong to another bucket.
            shortest = max(longest - longest // _NARROW, budget // (size + 1))
            alike = end - _first_longer(num_samples, shortest, min_samples)
            nearly = end - _first_longer(num_samples, longest - longest // _WIDE, min_samples)
            num_groups = max(1, alike // group, min(_WANTED_GROUPS, nearly // group))
            num_cuts = num_groups * group
        buckets.append(Bucket(end - num_cuts, num_cuts, num_fillers, size, longest, groups_so_far, num_groups))
        groups_so_far += num_groups
        end -= num_cuts
    return buckets


def _first_longer(num_samples: NDArray[np.int64], threshold: int, min_samples: int) -> int:
    """Returns the first row that is longer than a threshold, lengths under `min_samples` counting as that."""
    return 0 if threshold < min_samples else int(np.searchsorted(num_samples, threshold, side="right"))


def _check_fits(num_samples: NDArray[np.int64], rate: int, budget: int, microbatches: int) -> None:
    if len(num_samples) == 0:
        raise PlanError("The corpus is empty: there is nothing to plan. Prepare it from a manifest with usable audio.")
    longest = int(num_samples[-1])
    if longest > budget:
        too_long = len(num_samples) - int(np.searchsorted(num_samples, budget, side="right"))
        raise PlanError(
            f"{too_long} of {len(num_samples)} cuts are longer than plan.max_batch_seconds ({budget / rate:g} s), the "
            f"longest lasts {longest / rate:.1f} s. Raise max_batch_seconds, "
            f"or prepare the corpus with --max-seconds {budget / rate:g}."
        )
    if len(num_samples) < microbatches:
        raise PlanError(
            f"The corpus has {len(num_samples)} cuts, fewer than plan.microbatches_per_step ({microbatches}), so that "
            "a step cannot give every microbatch a cut. Lower microbatches_per_step, or add data."
        )
