"""Settings of a preflight and of the search for a batch budget, which commands read without importing torch."""

import re
from dataclasses import dataclass

from nestdata.config_checks import require
from nestdata.field_docs import with_field_docs
from nestmodel.errors import ConfigError

MEMORY_MARGIN = 0.1
"""Share of the memory that steps leave free, because a run needs some memory for more than its steps."""

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightConfig:
    """Extent of a preflight."""

    num_batches: int = 3
    """Number of batches that each rank reads; at least three, and three for each loader worker."""

    timeout_s: float = 300.0
    """How long ranks wait for each other, at the start and in each check, in seconds."""

    def __post_init__(self) -> None:
        require(self.num_batches >= 1, "num_batches", self.num_batches, "at least 1")
        require(self.timeout_s > 0, "timeout_s", self.timeout_s, "a positive number of seconds")


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetConfig:
    """Limits of a search for a batch budget."""

    memory_limit: str | None = None
    """Memory of one rank in a search (`--find-budget`), with its unit, such as 8GiB. Required on a CPU; on a GPU, None
    means all free memory."""

    memory_margin: float = MEMORY_MARGIN
    """Share of the memory that a search (`--find-budget`) leaves free, in [0, 1): for fragmentation, buffers of NCCL,
    other processes."""

    timeout_s: float = 300.0
    """Longest time for one step of a trial, in seconds."""

    def __post_init__(self) -> None:
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit)
        require(0.0 <= self.memory_margin < 1.0, "memory_margin", self.memory_margin, "a share in [0, 1)")
        require(self.timeout_s > 0, "timeout_s", self.timeout_s, "a positive number of seconds")


def parse_bytes(text: str) -> int:
    """Returns the number of bytes of `memory_limit`, such as `8GiB` or `750 MB`.

    Raises:
        ConfigError: The text is not a positive number with a known unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", text)
    number = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if number <= 0:
        raise ConfigError(
            f"memory_limit is {text!r}: give a size with one of the units {', '.join(_UNITS)}, such as 8GiB."
        )
    return number
