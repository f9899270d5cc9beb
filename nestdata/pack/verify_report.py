"""What `verify_corpus` finds, and the comparisons that corpora and packed sets share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nestdata.errors import StorageError
from nestdata.storage import FileVersion, is_url, storage


@dataclass(frozen=True, slots=True)
class VerifyProblem:
    """A difference between audio and what its corpus or packed set says."""

    location: str
    """The file or object."""

    kind: str
    """Category, such as missing, changed, corrupt or unreadable."""

    detail: str
    """An explanation that gives the values found."""

    def __str__(self) -> str:
        return f"{self.location}: {self.kind}: {self.detail}"


@dataclass(kw_only=True)
class VerifyReport:
    """The result of `verify_corpus`."""

    location: str
    """The corpus or packed set."""

    num_cuts: int
    num_shards: int
    """Number of shards, whose sizes were compared. Local files that are not in tars do not count."""

    reads_audio: bool = False
    """Whether bytes or samples were read, rather than sizes, times and ETags only."""

    num_checked: int = 0
    """Number of cuts whose bytes or samples were read; 0 without checksums."""

    problems: list[VerifyProblem] = field(default_factory=list)

    num_accepted: int = 0
    """Number of cuts whose files have changed, and are used as they are from now on."""

    new_root: str | None = None
    """The root that was written to `meta.json`; None if it stays as it was."""

    def summary(self) -> str:
        """Returns one line with the counts."""
        checked = f", audio of {self.num_checked} read" if self.num_checked else ""
        accepted = f", changed files of {self.num_accepted} accepted" if self.num_accepted else ""
        found = f"{len(self.problems)} problems" if self.problems else "no problems"
        if not (self.problems or self.reads_audio):
            found += " in sizes and times; no audio was read, which --checksums does"
        return f"{self.location}: {self.num_cuts} cuts{checked}{accepted}, {self.num_shards} shards: {found}"


class Checked(NamedTuple):
    """The result of one task."""

    num_checked: int
    """Number of cuts whose bytes or samples were read."""

    problems: list[VerifyProblem]
    accepted: Sequence[tuple[int, FileVersion]] = ()
    """Cuts whose files have changed and can be used, by their indices, with the new versions of the files."""


def problem_of(error: OSError | StorageError, location: str) -> VerifyProblem:
    """Returns what kept a file or object from being read, as a problem of it.

    Raises:
        StorageError: The store does not answer or refuses its credentials, which says nothing about the audio.
    """
    if isinstance(error, OSError):
        return VerifyProblem(location, "unreadable", error.strerror or type(error).__name__)
    is_of_store = is_url(location) and error.kind not in ("missing", "changed")
    if is_of_store or error.kind == "unavailable":
        raise error
    return VerifyProblem(location, error.kind, str(error).removeprefix(f"{location}: "))


def compare_size(location: str, size: int, etag: str | None) -> list[VerifyProblem]:
    """Compares a file or object with the size and ETag that it should have.

    Raises:
        StorageError: The store does not answer.
    """
    try:
        found = storage().info(location)
    except StorageError as error:
        return [problem_of(error, location)]
    if found.size != size:
        return [VerifyProblem(location, "changed", f"it has {found.size} bytes, and should have {size}")]
    if etag is not None and found.etag is not None and found.etag != etag:
        return [VerifyProblem(location, "changed", f"its ETag is {found.etag}, and was {etag}")]
    return []
