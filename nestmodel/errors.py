"""Errors that only nestmodel raises; `nestdata.errors` shows all errors of both packages."""

from nestdata import ConfigError as ConfigError
from nestdata import NestError


class ExtractError(NestError):
    """The features of an utterance cannot be computed or written."""


class ProbeError(NestError):
    """The labels or texts of a corpus do not suffice for a probe, or training and test utterances share audio."""


class TrainingError(NestError):
    """Training cannot continue, for example after too many consecutive steps with a non-finite loss or gradient."""


class WeightsError(NestError):
    """A model file cannot be read or written, or does not hold the weights that the model needs."""


# cuBLAS and cuDNN report their own failed allocations, for instance CUBLAS_STATUS_ALLOC_FAILED.
# The CPU allocator raises a RuntimeError, whose text depends on the platform: "can't allocate memory" on Linux, "not
# enough memory" on Windows.
_MESSAGES = ("out of memory", "allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error reports that the memory of the machine or of a GPU was exhausted."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's own
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)
