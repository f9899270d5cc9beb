"""Errors of nestmodel besides those of nestdata; `nestdata.errors` shows all of them."""

from nestdata import ConfigError as ConfigError
from nestdata import NestError


class ExtractError(NestError):
    """The features of an utterance cannot be computed or written."""


class LaunchError(ConfigError):
    """A run cannot compute with the ranks that a launcher has started. Every rank finds it; rank 0 prints it."""


class ProbeError(NestError):
    """The labels or texts of a corpus do not suffice for a probe, or training and test utterances share audio."""


class TrainingError(NestError):
    """Training cannot continue, for example after too many consecutive steps with a non-finite loss or gradient."""


class WeightsError(NestError):
    """A model file cannot be read or written, or does not hold the weights that the model needs."""
