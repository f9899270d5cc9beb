"""Errors of nestmodel, one tree: catch the root to catch them all.

    NestModelError
    ├── ConfigError    a setting, preset or foreign configuration that cannot be used
    ├── ExtractError   features cannot be made of an utterance, or not be put where they should go
    ├── ProbeError     the labels do not allow a probe
    ├── TrainingError  training cannot go on
    └── WeightsError   a file of weights cannot be read, or does not fit the model

Every constructor takes one string, so that an error raised in another process can be rebuilt from its text alone.
"""


class NestModelError(Exception):
    """Root of all errors that nestmodel raises on purpose."""


class ConfigError(NestModelError):
    """A setting is out of range, unknown, of the wrong type, or not implemented."""


class ExtractError(NestModelError):
    """Features cannot be made of an utterance, or not be put where they should go."""


class ProbeError(NestModelError):
    """The labels of a corpus do not allow a probe: there are none, or too few of a kind."""


class TrainingError(NestModelError):
    """Training cannot go on: the loss or the gradients are no numbers, step after step."""


class WeightsError(NestModelError):
    """A file of weights cannot be read, or does not hold what the model needs."""
