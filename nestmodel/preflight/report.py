"""What a preflight says: of each check on each rank, of each check, and of all of it."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from nestmodel.errors import ConfigError

Status = Literal["skipped", "ok", "warning", "failed"]

CHECKS = ("settings", "restarts", "disk", "shared memory", "reading", "training step", "collectives")
_SEVERITY: tuple[Status, ...] = ("skipped", "ok", "warning", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """What one check found on one rank."""

    status: Status
    value: str
    """In a few words."""

    advice: str = ""
    """What is wrong and what to do; empty where nothing is."""

    figures: dict[str, float] = field(default_factory=dict)
    """Numbers by name, in bytes and seconds; ranks are compared by the first."""

    def __post_init__(self) -> None:
        if self.status not in _SEVERITY:
            raise ConfigError(f"the status of a check is {self.status!r}: expected one of {', '.join(_SEVERITY)}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """What one check found, rank by rank."""

    name: str
    ranks: tuple[CheckResult, ...]

    def __post_init__(self) -> None:
        if self.name not in CHECKS:
            raise ConfigError(f"there is no check {self.name!r}: the checks are {', '.join(CHECKS)}.")
        if not self.ranks:
            raise ConfigError(f"check {self.name!r} has no results: give one for each rank.")

    @property
    def status(self) -> Status:
        """The worst of any rank."""
        return max((one.status for one in self.ranks), key=_SEVERITY.index)

    @property
    def summary(self) -> str:
        """What the worst rank found: that with the greatest figure among those of the worst status."""

        def badness(rank: int) -> tuple[int, float, int]:
            one = self.ranks[rank]
            return _SEVERITY.index(one.status), next(iter(one.figures.values()), 0.0), -rank

        worst = max(range(len(self.ranks)), key=badness)
        is_shared = len({one.value for one in self.ranks}) == 1
        return self.ranks[worst].value + ("" if is_shared else f" (rank {worst})")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightReport:
    """What a preflight found."""

    world_size: int
    device: str
    checks: tuple[CheckReport, ...]

    def __post_init__(self) -> None:
        numbers = Counter(len(check.ranks) for check in self.checks)
        if self.world_size < 1 or set(numbers) - {self.world_size}:
            raise ConfigError(f"world_size is {self.world_size}, and the checks are of {dict(numbers)} ranks.")

    @property
    def has_failed(self) -> bool:
        """Whether any check failed on any rank."""
        return any(check.status == "failed" for check in self.checks)

    def problems(self) -> list[str]:
        """Returns a line for each rank and check that is not as it should be, and what to do."""
        return [
            f"{one.status}: {check.name}, rank {rank}: {one.advice or one.value}"
            for check in self.checks
            for rank, one in enumerate(check.ranks)
            if one.status in ("warning", "failed")
        ]

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as JSON can hold it."""
        return {"ok": not self.has_failed, **asdict(self)}
