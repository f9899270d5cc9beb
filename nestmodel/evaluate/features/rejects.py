"""Utterances without features: the record of one, and the file that lists all of them."""

import json
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from nestdata import Corpus


class RejectedUtterance(NamedTuple):
    """An utterance without features; the fields are those of the rejects of `nestdata prepare`."""

    where: str
    """Path of the audio file; empty if the audio is not in a file of its own."""

    cut_id: str
    reason: str
    """One word, for counting."""

    detail: str
    """What was wrong, with the values that were found."""


class RejectLog:
    """Writes `rejected.jsonl`, one line per rejected input, and counts the inputs by reason.

    Use it as a context manager: the file is open inside the `with` block, and complete after it.

    Args:
        directory: Directory in which the file is created.
        name: Name of the file.
    """

    def __init__(self, directory: Path, name: str = "rejected.jsonl") -> None:
        self._file = (directory / name).open("w", encoding="utf-8")
        self._counts: Counter[str] = Counter()
        self._cut_ids: set[str] = set()
        self.first: RejectedUtterance | None = None
        """The utterance that was added first; None before that."""

    def __enter__(self) -> "RejectLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def counts(self) -> dict[str, int]:
        """Number of rejected inputs by reason, the most frequent reason first."""
        return dict(self._counts.most_common())

    def add(self, rejected: RejectedUtterance) -> None:
        """Adds an utterance, unless it was added before: several passes over a corpus reject the same utterances."""
        if rejected.cut_id in self._cut_ids:
            return
        self._cut_ids.add(rejected.cut_id)
        self.first = self.first or rejected
        self._counts[rejected.reason] += 1
        self._file.write(json.dumps(rejected._asdict()) + "\n")

    def copy_from(self, corpus: Corpus) -> None:
        """Adds the inputs that `prepare_corpus` rejected when it wrote a corpus."""
        self._file.write((corpus.path / "rejected.jsonl").read_text(encoding="utf-8"))
        self._counts.update(corpus.meta["rejected"])
