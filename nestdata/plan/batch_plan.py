"""The batch plan: which cuts are in which microbatch of which optimizer step, computed from the sorted cut lengths.

Nothing is materialised and no state is kept. Any step is therefore reached in constant time, and a batch depends on
neither the number of ranks nor the history of the run. All arithmetic is on integer sample counts. The algorithm is
described in `docs/how-a-batch-is-chosen.md`.
"""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from nestdata.config_checks import require_instance
from nestdata.corpus.corpora import Corpora, CorpusInput
from nestdata.errors import ConfigError, PlanError
from nestdata.plan.budget import Budget, leave_out_cuts
from nestdata.plan.layout import lay_out
from nestdata.plan.lengths import Lengths, LengthsLike, as_lengths, check_ascending
from nestdata.plan.microbatch import MicrobatchKey, PlannedMicrobatch
from nestdata.plan.mixture import num_positions, repeats_per_epoch
from nestdata.plan.plan_config import PlanConfig
from nestdata.plan.positions import Bucket, CutRange, Positions
from nestdata.plan.stages import Stages
from nestdata.stateless_rng import Permutation, StatelessRng, derive_key

ALGORITHM_VERSION = 5
"""Part of the fingerprint: increase it with every change to which cuts a step holds."""

# Substitutes are drawn from at least this many cuts, or from all that are short enough.
_MIN_SUBSTITUTES = 32


class BatchPlan:
    """Computes the cuts of any (step, microbatch) in constant time.

    Step numbers continue after the first epoch: `epoch = step // steps_per_epoch`, and every epoch has its own order.
    The microbatches of a step have about the same work, the seconds of their padded cuts. They have the same shape
    where the corpus has enough cuts of one length, and neighbouring lengths elsewhere. In an epoch every cut is seen
    once, except for the cuts in `left_out`. If an epoch has more microbatches than cuts, or if `num_shapes` is set,
    short cuts are repeated to fill up the last step; they are drawn anew in each epoch. Cuts of weighted corpora are
    seen as often as `repeats_per_epoch` says, and equally often: within a bucket, no cut of a corpus is seen again
    before all other cuts of that corpus have been seen. The same holds in the steps of mixture stages, also across
    stages (`nestdata.plan.stages`).

    Args:
        num_samples: Length of every cut in samples, ascending, as an array or list of integers of any type; for several
            corpora, a list of these. Indices count over all corpora, one after the other. May be memory-mapped.
        sampling_rate: Sampling rate of the cuts, in Hz.
        config: Budget, microbatches per step, weights and seed.
        content: Fingerprint of the cuts that the indices refer to, such as `Corpus.fingerprint`. The lengths are then
            taken to be ascending without reading all of them. Without it, they are checked, and the fingerprint of the
            plan is computed from them.

    Raises:
        PlanError: The lengths are not integers, not one-dimensional, negative or not ascending. There are no cuts, or
            fewer cuts than microbatches in a step. All cuts are too short, or more than a tenth of the audio is in cuts
            that no microbatch can hold.
        ConfigError: The number of weights or of languages is not the number of corpora.
    """

    def __init__(self, num_samples: LengthsLike, sampling_rate: int, config: PlanConfig, *, content: str = "") -> None:
        corpora = as_lengths(num_samples)
        if not content:
            check_ascending(corpora)
        self.config = config
        self.sampling_rate = sampling_rate
        self.min_samples = round(config.min_audio_seconds * sampling_rate)
        self.budget = Budget(
            limit=round(config.max_batch_seconds * sampling_rate),
            quadratic_samples=round(config.quadratic_seconds * sampling_rate) if config.quadratic_seconds else None,
            max_cuts=config.max_cuts,
            microbatches=config.microbatches_per_step,
        )
        first_indices = list(accumulate(map(len, corpora[:-1]), initial=0))
        content = content or _digest(b"".join(np.ascontiguousarray(lengths).tobytes() for lengths in corpora))
        shortest_allowed = math.ceil(config.min_seconds * sampling_rate)
        self.kept, self.left_out = leave_out_cuts(
            corpora, sampling_rate, self.budget, self.min_samples, shortest_allowed
        )
        """The cuts of each corpus that are in the plan, and a count of the others."""

        corpora = [lengths[cuts] for lengths, cuts in zip(corpora, self.kept, strict=True)]
        first_kept = [first + cuts.start for first, cuts in zip(first_indices, self.kept, strict=True)]
        self.repeats_per_epoch = repeats_per_epoch(corpora, config, config.languages, "plan")
        """How often each cut of each corpus is seen in an epoch, on average, before the first mixture stage."""

        self.stage_repeats = {
            stage.from_step: repeats_per_epoch(corpora, stage, config.languages, f"plan.stages[{number}]")
            for number, stage in enumerate(config.stages)
        }
        """The same for each mixture stage, by its first step, per as many hours as all corpora together have."""

        self.layouts = self._lay_out(corpora, first_kept)
        """The buckets of an epoch, longest cuts first. Epochs take one layout after the other."""

        last = self.buckets[-1]
        self.steps_per_epoch = (last.first_microbatch + last.num_microbatches) // config.microbatches_per_step
        self.stages = Stages(
            self.buckets,
            first_indices,
            self.stage_repeats,
            microbatches_per_step=config.microbatches_per_step,
            seed=config.seed,
        )
        self.first_fingerprint = self._make_fingerprint(content, {})
        """Identifies the plan without its mixture stages."""

        self.fingerprint = self._make_fingerprint(content, self.stage_repeats)
        """Identifies this plan: two plans with the same fingerprint give the same indices for every step."""

    @classmethod
    def of(cls, corpus: CorpusInput, config: PlanConfig | None = None) -> "BatchPlan":
        """Returns the plan of one or several prepared corpora.

        Args:
            corpus: A path, a `Corpus`, `Corpora`, or a list of paths and corpora. Cuts and manifests have to be
                prepared first, with `prepare_corpus`.
            config: The defaults if None.

        Raises:
            CorpusError: A corpus cannot be opened, or something else is given.
            PlanError: The cuts do not fit the settings; the message names the corpora.
            ConfigError: There is no corpus, the sampling rates differ, or weights or languages do not fit the corpora.
        """
        require_instance("config", config, PlanConfig, or_none=True)
        corpora = Corpora.of(corpus)
        try:
            return cls(corpora.num_samples, corpora.sampling_rate, config or PlanConfig(), content=corpora.fingerprint)
        except PlanError as error:
            paths = [str(corpus.path) for corpus in corpora.corpora]
            raise PlanError(f"{', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''}: {error}") from None

    def microbatch(self, step: int, microbatch: int) -> PlannedMicrobatch:
        """Returns the cuts of one microbatch, their bucket, and the epoch.

        Raises:
            IndexError: The step is negative or the microbatch is not in [0, microbatches_per_step).
        """
        if step < 0 or not 0 <= microbatch < self.config.microbatches_per_step:
            raise IndexError(
                f"step {step}, microbatch {microbatch}: steps start at 0 and microbatches are in "
                f"[0, {self.config.microbatches_per_step})"
            )
        key, epoch = MicrobatchKey(step, microbatch), self.epoch(step)
        if self.stages.has(step):
            number, indices = self.stages.microbatch(step, microbatch)
            return PlannedMicrobatch(key, epoch, indices, self.buckets, number)
        layout = self.layouts[epoch % len(self.layouts)]
        group = self._permutation("groups", epoch, 0, self.steps_per_epoch).at(step % self.steps_per_epoch)
        number_in_epoch = group * self.config.microbatches_per_step + microbatch
        number = bisect_right(layout, number_in_epoch, key=lambda bucket: bucket.first_microbatch) - 1
        bucket = layout[number]
        size = bucket.cuts_per_microbatch
        start = (number_in_epoch - bucket.first_microbatch) * size
        positions = np.arange(start, start + size, dtype=np.int64)
        own = positions[positions < bucket.num_cuts]
        to_fill = positions[positions >= bucket.num_cuts] - bucket.num_cuts
        order = self._permutation("cuts", epoch, number, bucket.num_cuts)
        indices = self._indices_at(bucket.cut_ranges, order(own), epoch, number)
        if to_fill.size:
            num_fillers = sum(cut_range.num_positions for cut_range in bucket.fillers)
            order = self._permutation("fillers", epoch, number, num_fillers)
            repeats = self._indices_at(bucket.fillers, order(to_fill % num_fillers), epoch, number)
            indices = np.concatenate([indices, repeats])
        return PlannedMicrobatch(key, epoch, indices, layout, number)

    def indices(self, step: int, microbatch: int) -> NDArray[np.int64]:
        """Returns the indices of the cuts of one microbatch in the corpora, shape (cuts,).

        Raises:
            IndexError: As for `microbatch`.
        """
        return self.microbatch(step, microbatch).indices

    def substitute(self, microbatch: PlannedMicrobatch, position: int, attempt: int) -> int:
        """Returns the index of a cut that replaces an unusable one, and is short enough for the microbatch.

        Args:
            microbatch: The microbatch.
            position: Position of the unusable cut within the microbatch.
            attempt: Number of earlier substitutes that were unusable as well; 0 at first.
        """
        buckets, number = microbatch.buckets, microbatch.bucket_number
        # Cuts of the bucket, and if they are few, of the next buckets, whose cuts are shorter.
        num_cuts = buckets[number].num_cuts
        for bucket in buckets[number + 1 :]:
            if num_cuts >= _MIN_SUBSTITUTES:
                break
            num_cuts += bucket.num_cuts
        drawn = StatelessRng(self.config.seed, "substitute", *microbatch.key, position, attempt).below(num_cuts)
        while drawn >= buckets[number].num_cuts:
            drawn -= buckets[number].num_cuts
            number += 1
        return int(self._indices_at(buckets[number].cut_ranges, np.array([drawn]), microbatch.epoch, number)[0])

    def epoch(self, step: int) -> int:
        """Returns the epoch that a step belongs to, counted from 0."""
        return step // self.steps_per_epoch

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of the first layout, which the first epoch and all mixture stages use."""
        return self.layouts[0]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """All pairs (cuts in a microbatch, samples to which they are padded), over all layouts."""
        shapes = ((bucket.cuts_per_microbatch, bucket.padded_samples) for layout in self.layouts for bucket in layout)
        return list(dict.fromkeys(shapes))

    def microbatches_of(self, rank: int, world_size: int) -> range:
        """Returns the microbatches that one rank takes of every step.

        Raises:
            ConfigError: The world size does not divide the microbatches of a step, or the rank does not exist.
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

    def __repr__(self) -> str:
        config = self.config
        return (
            f"BatchPlan(steps_per_epoch={self.steps_per_epoch}, microbatches_per_step={config.microbatches_per_step}, "
            f"max_batch_seconds={config.max_batch_seconds:g}, seed={config.seed})"
        )

    def _lay_out(self, corpora: Sequence[Lengths], first_indices: Sequence[int]) -> list[tuple[Bucket, ...]]:
        positions = [
            Positions(lengths, num_positions(lengths, repeats), first_index, self.min_samples)
            for lengths, repeats, first_index in zip(corpora, self.repeats_per_epoch, first_indices, strict=True)
            if len(lengths)
        ]
        if (total := sum(each.num_positions for each in positions)) < self.config.microbatches_per_step:
            raise PlanError(
                f"there are {total} cuts that fit into a microbatch, fewer than plan.microbatches_per_step "
                f"({self.config.microbatches_per_step}), so that a step cannot give every microbatch a cut. Lower "
                "microbatches_per_step, or add data."
            )
        # The passes over repeated cuts go on from epoch to epoch within a bucket, which therefore stays the same.
        alternates = all(repeats == 1.0 for repeats in self.repeats_per_epoch)
        config = self.config
        return lay_out(positions, self.budget, config.bucket_width, config.num_shapes, alternates=alternates)

    def _make_fingerprint(self, content: str, stage_repeats: dict[int, list[float]]) -> str:
        # 240 and 240.0 seconds are the same setting but different text.
        settings = {name: float(v) if name.endswith("_seconds") and v else v for name, v in asdict(self.config).items()}
        # Weights and temperatures affect the plan only through the repeats that they lead to.
        for name in ("languages", "language_temperature", "stages"):
            settings.pop(name, None)
        settings |= {"weights": self.repeats_per_epoch, "temperature": 1.0}
        settings |= {"stages": list(stage_repeats.items())} if stage_repeats else {}
        settings |= {"sampling_rate": self.sampling_rate, "version": ALGORITHM_VERSION, "content": content}
        return _digest(json.dumps(settings, sort_keys=True).encode())

    def _indices_at(
        self, cut_ranges: Sequence[CutRange], positions: NDArray[np.int64], epoch: int, bucket: int
    ) -> NDArray[np.int64]:
        """Returns the indices of the cuts at given positions of an epoch.

        Args:
            cut_ranges: Cuts of one bucket, one range for each corpus.
            positions: Positions, counted over all cut ranges one after the other.
            epoch: Number of the epoch, counted from 0.
            bucket: Number of the bucket.
        """
        if len(cut_ranges) == 1 and cut_ranges[0].num_cuts == cut_ranges[0].num_positions:
            return cut_ranges[0].first_index + positions
        indices = np.empty_like(positions)
        ends = list(accumulate(cut_range.num_positions for cut_range in cut_ranges))
        for number, (cut_range, end) in enumerate(zip(cut_ranges, ends, strict=True)):
            is_here = (positions >= end - cut_range.num_positions) & (positions < end)
            own = positions[is_here] - (end - cut_range.num_positions)
            if cut_range.num_cuts != cut_range.num_positions:
                # Passes over these cuts continue from epoch to epoch; each pass shows every cut once in a new order.
                passes, offsets = np.divmod(epoch * cut_range.num_positions + own, cut_range.num_cuts)
                for one_pass in np.unique(passes).tolist():
                    key = derive_key(self.config.seed, "views", one_pass, bucket, number)
                    own[passes == one_pass] = Permutation(cut_range.num_cuts, key)(offsets[passes == one_pass])
            indices[is_here] = cut_range.first_index + own
        return indices

    def _permutation(self, purpose: str, epoch: int, counter: int, size: int) -> Permutation:
        return Permutation(size, derive_key(self.config.seed, purpose, epoch, counter))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
