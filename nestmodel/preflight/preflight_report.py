"""The result of a preflight: of one check on one rank, of one check on all ranks, and of all checks."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["skipped", "ok", "warning", "failed"]

_SEVERITY: tuple[Status, ...] = ("skipped", "ok", "warning", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The result of one check on one rank."""

    status: Status
    value: str
    """The measurement in a few words."""

    advice: str = ""
    """What is wrong and how to fix it; empty if nothing is wrong."""

    figures: dict[str, float] = field(default_factory=dict)
    """Numbers by name, in bytes and seconds. Ranks of equal status are compared by the first of them."""

    notes: tuple[str, ...] = ()
    """Lines of explanation, which are shown whatever the status."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """The results of one check on all ranks."""

    name: str
    ranks: tuple[CheckResult, ...]
    """The result of each rank, in order."""

    @property
    def status(self) -> Status:
        """The worst status of all ranks."""
        return max((result.status for result in self.ranks), key=_SEVERITY.index)

    @property
    def worst_rank(self) -> int:
        """The rank with the largest first figure among those with the worst status."""

        def severity(rank: int) -> tuple[int, float, int]:
            result = self.ranks[rank]
            return _SEVERITY.index(result.status), next(iter(result.figures.values()), 0.0), -rank

        return max(range(len(self.ranks)), key=severity)

    @property
    def summary(self) -> str:
        """The value of the worst rank."""
        worst = self.worst_rank
        is_same_on_all = len({result.value for result in self.ranks}) == 1
        return self.ranks[worst].value + ("" if is_same_on_all else f" (rank {worst})")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightReport:
    """The results of all checks on all ranks."""

    world_size: int
    device: str
    """Type of the device of rank 0, such as `cpu` or `cuda`."""

    checks: tuple[CheckReport, ...]
    """The checks in the order in which they ran."""

    @property
    def has_failed(self) -> bool:
        """Whether any check failed on any rank."""
        return any(check.status == "failed" for check in self.checks)

    def problems(self) -> list[str]:
        """Returns one line for each warning and each failure, with the check, the rank and the advice."""
        return [
            f"{result.status}: {check.name}, rank {rank}: {result.advice or result.value}"
            for check in self.checks
            for rank, result in enumerate(check.ranks)
            if result.status in ("warning", "failed")
        ]

    def notes(self) -> list[str]:
        """Returns the explanations of the worst rank of each check, with the name of the check."""
        return [f"{check.name}: {note}" for check in self.checks for note in check.ranks[check.worst_rank].notes]

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as a dictionary of values that JSON can represent."""
        return {"ok": not self.has_failed, **asdict(self)}
