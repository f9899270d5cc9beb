"""Settings of a plan and of its mixtures. Imports no heavy package, so that the help of commands starts fast."""

import math
from dataclasses import dataclass

from nestdata.config_checks import require, require_at_least
from nestdata.field_docs import with_field_docs


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class MixtureStage:
    """A mixture of the corpora from an optimizer step up to the next stage. Does not inherit from other stages."""

    from_step: int
    """First optimizer step of the stage, counted from 0."""

    weights: tuple[float, ...] | None = None
    """Relative share of the hours for each corpus, in order; None takes the hours of each corpus."""

    temperature: float = 1.0
    """Every share of a corpus is raised to the power 1/temperature, within its language if `plan.languages` is set."""

    language_temperature: float = 1.0
    """Every share of a language is raised to the power 1/language_temperature."""


def check_mixture(mixture: "PlanConfig | MixtureStage", languages: tuple[str, ...] | None, where: str) -> None:
    """Raises ConfigError if a setting of a mixture is out of range.

    Args:
        mixture: The settings.
        languages: Language of each corpus, if given.
        where: Path of the settings, such as `plan`.
    """
    weights = mixture.weights
    are_positive = weights is None or (bool(weights) and all(0 < weight < math.inf for weight in weights))
    require(are_positive, f"{where}.weights", weights, "a positive number for each corpus")
    require(mixture.temperature > 0, f"{where}.temperature", mixture.temperature, "a positive number")
    name, temperature = f"{where}.language_temperature", mixture.language_temperature
    require(temperature > 0, name, temperature, "a positive number")
    require(temperature == 1.0 or languages is not None, name, temperature, "the languages in plan.languages as well")


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How cuts are grouped into microbatches and optimizer steps."""

    max_batch_seconds: float = 240.0
    """Seconds per microbatch, padding included.

    This is the budget of a microbatch, its largest duration."""

    microbatches_per_step: int = 8
    """Microbatches per step over all ranks.

    Every world size that divides it gives the same optimizer steps."""

    min_audio_seconds: float = 1.0
    """Lengthen shorter cuts to this many seconds.

    They are lengthened before augmentation and mixing."""

    min_seconds: float = 0.0
    """Leave out shorter cuts.

    Cuts that are lengthened by repetition contain their masked frames a second time. With 0, no cut is left out."""

    quadratic_seconds: float | None = None
    """Value of q, where a cut of d seconds counts as d + d²/q against the maximum.

    The cost of attention grows faster than the length. With None, a cut of d seconds counts as d."""

    max_cuts: int | None = None
    """Maximum number of cuts per microbatch.

    None sets no limit besides the budget."""

    bucket_width: float = 1 / 128
    """Largest difference of lengths in a bucket.

    It is a share of the longest cut in the bucket. Narrower buckets have less padding and fewer cuts. Buckets of fewer
    than 32 microbatches may be wider, so that the same cuts are not always together; all of them add at most 1.7 % of
    padding. Without effect if `num_shapes` is set."""

    num_shapes: int | None = None
    """Number of padded lengths, for each of which code is compiled.

    The lengths are chosen to minimise padding, and a model sees few shapes. The last step of an epoch is then
    filled up with repeated cuts. None pads to the longest cut of each bucket."""

    weights: tuple[float, ...] | None = None
    """Share of each corpus in the hours of an epoch, such as 0.7 0.3.

    Shares are relative to each other. None takes the hours of each corpus as its share."""

    temperature: float = 1.0
    """Above 1, small corpora are repeated more often.

    Every share is raised to the power 1/temperature. With `languages`, this holds for the corpora within each
    language."""

    languages: tuple[str, ...] | None = None
    """Language of each of several corpora, in order. A language's share is the sum of the shares of its corpora, to the
    power 1/language_temperature."""

    language_temperature: float = 1.0
    """Above 1, small languages are seen more often than large ones."""

    stages: tuple[MixtureStage, ...] = ()
    """Mixtures that replace `weights` and both temperatures from a step on, in order. Stages may be added when a run
    is resumed."""

    seed: int = 0
    """Seed of the order of cuts, and of every random number that is keyed by this plan."""

    def __post_init__(self) -> None:
        positive = "a positive number of seconds"
        require(0 < self.max_batch_seconds < math.inf, "plan.max_batch_seconds", self.max_batch_seconds, positive)
        require_at_least(1, "plan", self, "microbatches_per_step", "max_cuts", "num_shapes")
        require(
            0 < self.min_audio_seconds <= self.max_batch_seconds,
            "plan.min_audio_seconds",
            self.min_audio_seconds,
            f"more than 0 and at most max_batch_seconds ({self.max_batch_seconds})",
        )
        require(0 <= self.min_seconds < math.inf, "plan.min_seconds", self.min_seconds, "0 or more seconds")
        require(0 < self.bucket_width <= 1 / 8, "plan.bucket_width", self.bucket_width, "more than 0 and at most 1/8")
        is_positive = self.quadratic_seconds is None or self.quadratic_seconds > 0
        require(is_positive, "plan.quadratic_seconds", self.quadratic_seconds, f"{positive}, or none")
        check_mixture(self, self.languages, "plan")
        for number, stage in enumerate(self.stages):
            before = self.stages[number - 1].from_step if number else -1
            expected = f"more than {before}, the first step of the stage before" if number else "0 or more"
            require(stage.from_step > before, f"plan.stages[{number}].from_step", stage.from_step, expected)
            check_mixture(stage, self.languages, f"plan.stages[{number}]")
