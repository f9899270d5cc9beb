"""Errors of nestmodel. `NestModelError` is the root of all of them.

    NestModelError
    ├── ConfigError    invalid setting, preset or foreign configuration
    ├── ExtractError   features cannot be computed or written
    ├── ProbeError     the labels or texts do not suffice for a probe
    ├── TrainingError  training or a preflight cannot continue
    └── WeightsError   model file that cannot be read or does not fit the model

Every constructor takes one string, so that an error can be pickled and sent from another process.
"""

from nestdata import redacted


class NestModelError(Exception):
    """Root of all errors that nestmodel raises deliberately. URLs in messages are shown without their secrets."""

    def __init__(self, message: str = "") -> None:
        super().__init__(redacted(message))


class ConfigError(NestModelError):
    """A setting is out of range, unknown, of the wrong type, or not implemented."""


class ExtractError(NestModelError):
    """The features of an utterance cannot be computed or written."""


class ProbeError(NestModelError):
    """The labels or texts of a corpus do not suffice for a probe, or training and test utterances share audio."""


class TrainingError(NestModelError):
    """Training cannot continue, for example after too many consecutive steps with a non-finite loss or gradient."""


class WeightsError(NestModelError):
    """A model file cannot be read or written, or does not hold the weights that the model needs."""
