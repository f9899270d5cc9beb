"""The plan: which cuts are in which microbatch of which optimizer step, as arithmetic on sorted lengths.

Nothing is materialised and nothing is remembered, so any step is reached at once and a batch depends on neither
the number of ranks nor the history of the run. All of it is integer arithmetic on sample counts. How it works is
told in `docs/how-a-batch-is-chosen.md`.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from nestdata.corpus.corpora import Corpora
from nestdata.corpus.corpus import Corpus
from nestdata.errors import ConfigError, PlanError
from nestdata.plan.layout import Bucket, Budget, Lengths, Part, Positions, lay_out
from nestdata.stateless_rng import Permutation, StatelessRng, derive_key

ALGORITHM_VERSION = 2
"""Goes into the fingerprint: bump it with any change to which cuts a step holds."""

# Shares of corpora are rounded to thousandths of a view of each cut, so that a plan does not hang on the last bit.
_VIEWS_UNIT = 1000


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

    quadratic_seconds: float | None = None
    """With q seconds, a cut of d seconds counts against the budget as d + d²/q seconds, since attention costs more
    for long cuts than their length; None counts the length alone."""

    max_cuts: int | None = None
    """Most cuts in one microbatch; None leaves it to the budget."""

    num_shapes: int | None = None
    """Rounds lengths up to so many, chosen to waste least, so that a compiled model meets few shapes; None pads to
    the longest cut of each bucket. The last step of an epoch is then filled up with repeats."""

    weights: tuple[float, ...] | None = None
    """Share of an epoch's hours that each of several corpora gets, up to a common factor; None: as many as it has."""

    temperature: float = 1.0
    """Raises every share to 1/temperature: above 1, small corpora are seen more often than large ones."""

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
        if self.quadratic_seconds is not None and self.quadratic_seconds <= 0:
            raise ConfigError(f"plan.quadratic_seconds is {self.quadratic_seconds}: give a positive number, or none.")
        for name in ("max_cuts", "num_shapes"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"plan.{name} is {getattr(self, name)}: give at least 1, or none.")
        if self.weights is not None and not (self.weights and min(self.weights) > 0):
            raise ConfigError(f"plan.weights is {self.weights}: give a positive number for each corpus.")
        if self.temperature <= 0:
            raise ConfigError(f"plan.temperature is {self.temperature}: give a positive number.")


class BatchPlan:
    """Cut rows of any (step, microbatch), in constant time.

    Steps count on past the epoch: `epoch = step // steps_per_epoch`, and each epoch has an order of its own. Within
    a step all microbatches have the same number of cuts and the same padded length. Over an epoch every cut is
    seen once, but for fewer than `microbatches_per_step` repeats of short ones that fill up one step; which ones
    they are changes with the epoch. Cuts of weighted corpora are seen as often as `repeats_per_epoch` says, evenly:
    none again before all others of its length.

    Args:
        num_samples: Length of every cut in samples, ascending, shape (num_cuts,); of several corpora, a list of
            these, whose rows are then counted on from one to the next. May be memory-mapped.
        sampling_rate: Of those samples, in Hz.
        config: Budget, group size, weights and seed.
        content: Fingerprint of what the rows stand for, such as `Corpus.fingerprint`. Without one, the
            plan's fingerprint is taken over all lengths.

    Raises:
        PlanError: There are no cuts, fewer cuts than microbatches in a step, or a cut longer than the budget; or the
            weights are not as many as the corpora.
    """

    def __init__(
        self,
        num_samples: Lengths | Sequence[Lengths],
        sampling_rate: int,
        config: PlanConfig,
        *,
        content: str = "",
    ) -> None:
        corpora = [num_samples] if isinstance(num_samples, np.ndarray) else list(num_samples)
        self.config = config
        self.sampling_rate = sampling_rate
        self.min_samples = round(config.min_audio_seconds * sampling_rate)
        self.repeats_per_epoch = _views(corpora, config)
        """How often each cut of each corpus is seen in an epoch, on average."""

        self.budget = Budget(
            limit=round(config.max_batch_seconds * sampling_rate),
            quadratic_samples=round(config.quadratic_seconds * sampling_rate) if config.quadratic_seconds else None,
            max_cuts=config.max_cuts,
            microbatches=config.microbatches_per_step,
        )
        self.buckets = tuple(self._lay_out(corpora))
        self._first_groups = [bucket.first_group for bucket in self.buckets]
        self.steps_per_epoch = self.buckets[-1].first_group + self.buckets[-1].num_groups
        content = content or _digest(b"".join(np.ascontiguousarray(lengths).tobytes() for lengths in corpora))
        self.fingerprint = self._make_fingerprint(content)
        """Names this plan: two plans with the same fingerprint give the same rows for every step."""

    @classmethod
    def of(cls, corpus: Corpus | Corpora, config: PlanConfig) -> "BatchPlan":
        """Returns the plan of a `Corpus`, or of several as `Corpora`.

        Raises:
            PlanError: Its cuts do not fit the settings; the message names the corpora.
        """
        try:
            return cls(corpus.num_samples, corpus.sampling_rate, config, content=corpus.fingerprint)
        except PlanError as error:
            paths = [str(one.path) for one in (corpus.corpora if isinstance(corpus, Corpora) else [corpus])]
            raise PlanError(f"{', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''}: {error}") from None

    def indices(self, step: int, microbatch: int) -> NDArray[np.int64]:
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
        rows = self._rows(bucket.parts, self._permutation("cuts", epoch, number, bucket.num_cuts)(own), epoch, number)
        if fill.size:
            num_fillers = sum(part.num_positions for part in bucket.fillers)
            order = self._permutation("fillers", epoch, number, num_fillers)
            rows = np.concatenate([rows, self._rows(bucket.fillers, order(fill % num_fillers), epoch, number)])
        return rows

    def substitute(self, step: int, microbatch: int, slot: int, attempt: int) -> int:
        """Returns the row of another cut for one slot of a microbatch, short enough for its shape.

        Args:
            step: As in `rows`.
            microbatch: As in `rows`.
            slot: The place within the microbatch whose cut cannot be used.
            attempt: Counts the substitutes that could not be used either, from 0.
        """
        epoch, number = self.epoch(step), self._locate(step)[0]
        bucket = self.buckets[number]
        draws = StatelessRng(self.config.seed, "substitute", step, microbatch, slot, attempt)
        drawn = np.array([draws.below(bucket.num_cuts)])
        return int(self._rows(bucket.parts, drawn, epoch, number)[0])

    def epoch(self, step: int) -> int:
        """Returns the epoch that a step belongs to, counted from 0."""
        return step // self.steps_per_epoch

    def bucket(self, step: int) -> Bucket:
        """Returns the bucket that a step is taken from."""
        return self.buckets[self._locate(step)[0]]

    def padded_samples(self, step: int) -> int:
        """Returns the length in samples to which every microbatch of a step is padded."""
        return self.bucket(step).padded_samples

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

    def _lay_out(self, corpora: Sequence[Lengths]) -> list[Bucket]:
        _check_fits(corpora, self.sampling_rate, self.budget, self.min_samples)
        first_rows = accumulate((len(lengths) for lengths in corpora), initial=0)
        slots = [
            Positions(lengths, _num_slots(lengths, view), first_row, self.min_samples)
            for lengths, view, first_row in zip(corpora, self.repeats_per_epoch, first_rows, strict=False)
            if len(lengths)
        ]
        if (total := sum(each.end for each in slots)) < self.config.microbatches_per_step:
            raise PlanError(
                f"there are {total} cuts, fewer than plan.microbatches_per_step "
                f"({self.config.microbatches_per_step}), so that a step cannot give every microbatch a cut. Lower "
                "microbatches_per_step, or add data."
            )
        return lay_out(slots, self.budget, self.config.num_shapes)

    def _make_fingerprint(self, content: str) -> str:
        # 240 and 240.0 seconds are one setting, but not one text.
        settings = {name: float(v) if name.endswith("_seconds") and v else v for name, v in asdict(self.config).items()}
        settings |= {"weights": self.repeats_per_epoch, "temperature": 1.0}  # only what comes of them counts
        settings |= {"sampling_rate": self.sampling_rate, "version": ALGORITHM_VERSION, "content": content}
        return _digest(json.dumps(settings, sort_keys=True).encode())

    def _rows(self, parts: Sequence[Part], slots: NDArray[np.int64], epoch: int, bucket: int) -> NDArray[np.int64]:
        """Returns the cuts that slots of some parts, taken together, show in an epoch."""
        if len(parts) == 1 and parts[0].num_rows == parts[0].num_positions:
            return parts[0].first_row + slots
        rows = np.empty_like(slots)
        ends = list(accumulate(part.num_positions for part in parts))
        for number, (part, end) in enumerate(zip(parts, ends, strict=True)):
            is_here = (slots >= end - part.num_positions) & (slots < end)
            own = slots[is_here] - (end - part.num_positions)
            if part.num_rows != part.num_positions:
                # Views of these cuts go on from epoch to epoch: a new order begins when each was seen once more.
                rounds, places = np.divmod(epoch * part.num_positions + own, part.num_rows)
                for turn in np.unique(rounds).tolist():
                    key = derive_key(self.config.seed, "views", turn, bucket, number)
                    own[rounds == turn] = Permutation(part.num_rows, key)(places[rounds == turn])
            rows[is_here] = part.first_row + own
        return rows

    def _locate(self, step: int) -> tuple[int, int]:
        """Returns the bucket of a step and the group within it."""
        epoch = self.epoch(step)
        order = self._permutation("groups", epoch, 0, self.steps_per_epoch)
        position = order.at(step % self.steps_per_epoch)
        number = bisect_right(self._first_groups, position) - 1
        return number, position - self._first_groups[number]

    def _permutation(self, purpose: str, epoch: int, bucket: int, size: int) -> Permutation:
        return Permutation(size, derive_key(self.config.seed, purpose, epoch, bucket))


def _views(corpora: Sequence[Lengths], config: PlanConfig) -> list[float]:
    if config.weights is not None and len(config.weights) != len(corpora):
        raise PlanError(
            f"plan.weights has {len(config.weights)} numbers for {len(corpora)} corpora. Give one for each, in order."
        )
    if len(corpora) == 1 or (config.weights is None and config.temperature == 1.0):
        return [1.0] * len(corpora)
    totals = [float(lengths.sum()) for lengths in corpora]
    if min(totals) <= 0:
        raise PlanError("one corpus among several is empty. Leave it out.")
    shares = [share ** (1 / config.temperature) for share in config.weights or totals]
    factor = sum(totals) / sum(shares)
    repeats_per_epoch = [factor * share / total for share, total in zip(shares, totals, strict=True)]
    return [max(1, round(_VIEWS_UNIT * view)) / _VIEWS_UNIT for view in repeats_per_epoch]


def _num_slots(lengths: Lengths, repeats_per_epoch: float) -> int:
    return max(1, len(lengths) * round(_VIEWS_UNIT * repeats_per_epoch) // _VIEWS_UNIT)


def _check_fits(corpora: Sequence[Lengths], rate: int, budget: Budget, min_samples: int) -> None:
    num_cuts = sum(map(len, corpora))
    if num_cuts == 0:
        raise PlanError("the corpus is empty: there is nothing to plan. Prepare it from a manifest with usable audio.")
    fits = budget.longest_of(1)
    longest = max(int(lengths[-1]) for lengths in corpora if len(lengths))
    if longest > fits:
        too_long = num_cuts - sum(int(np.searchsorted(lengths, fits, side="right")) for lengths in corpora)
        counted = ", quadratic term included" if budget.quadratic_samples else ""
        raise PlanError(
            f"{too_long} of {num_cuts} cuts are longer than plan.max_batch_seconds allows "
            f"({fits / rate:g} s{counted}), the longest lasts {longest / rate:.1f} s. Raise max_batch_seconds, "
            f"or prepare the corpus with --max-seconds {fits / rate:g} or --window-seconds {fits / rate:g}."
        )
    if min_samples > fits:
        raise PlanError(
            f"plan.min_audio_seconds is {min_samples / rate:g} s, more than a microbatch holds ({fits / rate:g} s). "
            "Lower it, or raise max_batch_seconds."
        )


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
