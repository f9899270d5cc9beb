"""Several corpora as one: rows are counted on from each to the next."""

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.corpus.corpus import Corpus
from nestdata.errors import ConfigError


class Corpora:
    """Corpora that are trained on together; how often each is seen is a matter of the plan.

    Raises:
        ConfigError: There is none, or they have several sampling rates.
    """

    def __init__(self, corpora: Sequence[Corpus]) -> None:
        if not corpora:
            raise ConfigError("no corpus was given: name at least one.")
        self.corpora = tuple(corpora)
        for corpus in corpora:
            corpus.check_rate(corpora[0])
        self._first_rows = list(accumulate(map(len, corpora), initial=0))

    @classmethod
    def open(cls, paths: Sequence[str | Path]) -> "Corpora":
        """Opens corpus directories.

        Raises:
            CorpusError: One of them is none, or damaged.
            ConfigError: They have several sampling rates.
        """
        return cls([Corpus.open(path) for path in paths])

    @property
    def num_samples(self) -> list[NDArray[np.int64]]:
        """Lengths of the cuts of each corpus, as `Corpus.num_samples`."""
        return [corpus.num_samples for corpus in self.corpora]

    @property
    def sampling_rate(self) -> int:
        """Rate in Hz at which all cuts are loaded."""
        return self.corpora[0].sampling_rate

    @property
    def fingerprint(self) -> str:
        """Names the content, and the order of the corpora; that of a single one is its own."""
        names = [corpus.fingerprint for corpus in self.corpora]
        return names[0] if len(names) == 1 else hashlib.blake2b("/".join(names).encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._first_rows[-1]

    def line(self, row: int) -> dict[str, Any]:
        """Returns the plain values of a cut; see `Corpus.line`."""
        corpus, own = self._locate(row)
        return corpus.line(own)

    def load(self, row: int, **span: Any) -> tuple[str, NDArray[np.float32]]:
        """Returns the id and samples of a cut; see `Corpus.load`."""
        corpus, own = self._locate(row)
        return corpus.load(own, **span)

    def num_samples_of(self, row: int) -> int:
        """Returns the length of one cut in samples."""
        corpus, own = self._locate(row)
        return corpus.num_samples_of(own)

    def _locate(self, row: int) -> tuple[Corpus, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} cuts")
        number = bisect_right(self._first_rows, row) - 1
        return self.corpora[number], row - self._first_rows[number]
