"""Several corpora with one common index: the cuts of each corpus follow the cuts of the previous one."""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.corpus.corpus import Corpus
from nestdata.errors import ConfigError, CorpusError

CorpusInput = str | os.PathLike[str] | Corpus | Any
"""Prepared corpora: the path of a corpus directory, a `Corpus`, or a list of them; or `Corpora`."""


class Corpora:
    """Corpora that are used together for training; the plan decides how often each is seen.

    Raises:
        ConfigError: No corpus was given, or the corpora have different sampling rates.
    """

    def __init__(self, corpora: Sequence[Corpus]) -> None:
        if not corpora:
            raise ConfigError("no corpus was given: name at least one.")
        self.corpora = tuple(corpora)
        for corpus in corpora:
            corpus.check_rate(corpora[0])
        self._first_indices = list(accumulate(map(len, corpora), initial=0))

    @classmethod
    def open(cls, paths: Sequence[str | Path]) -> "Corpora":
        """Opens corpus directories.

        Raises:
            CorpusError: A path is not a corpus directory, or the corpus is damaged.
            ConfigError: The corpora have different sampling rates.
        """
        return cls([Corpus.open(path) for path in paths])

    @classmethod
    def of(cls, given: CorpusInput) -> "Corpora":
        """Returns corpora that are given in any form; directories are opened.

        Args:
            given: One or several corpora.

        Raises:
            CorpusError: A path is not a corpus directory, the corpus is damaged, or something else is given.
            ConfigError: The corpora have different sampling rates, or there is none.
        """
        if isinstance(given, cls):
            return given
        several = given if isinstance(given, (list, tuple)) else [given]
        return cls([open_corpus(path_or_corpus) for path_or_corpus in several])

    @property
    def num_samples(self) -> list[NDArray[np.int64]]:
        """Lengths of the cuts of each corpus in samples; see `Corpus.num_samples`."""
        return [corpus.num_samples for corpus in self.corpora]

    @property
    def sampling_rate(self) -> int:
        """Sampling rate in Hz at which all cuts are loaded."""
        return self.corpora[0].sampling_rate

    @property
    def fingerprint(self) -> str:
        """Identifies the content and the order of the corpora; for one corpus, equal to its own fingerprint."""
        names = [corpus.fingerprint for corpus in self.corpora]
        return names[0] if len(names) == 1 else hashlib.blake2b("/".join(names).encode(), digest_size=16).hexdigest()

    @property
    def hours(self) -> float:
        """Total duration of all cuts in hours."""
        return sum(corpus.hours for corpus in self.corpora)

    def __len__(self) -> int:
        return self._first_indices[-1]

    def __repr__(self) -> str:
        number = "1 corpus" if len(self.corpora) == 1 else f"{len(self.corpora)} corpora"
        return f"Corpora({number}, {len(self)} cuts, {self.hours:.2f} h, {self.sampling_rate} Hz)"

    def line(self, index: int) -> dict[str, Any]:
        """Returns a cut as a dict; see `Corpus.line`."""
        corpus, own_index = self.locate(index)
        return corpus.line(own_index)

    @property
    def is_remote(self) -> bool:
        """Whether audio of any corpus is read from an object store; see `Corpus.is_remote`."""
        return any(corpus.is_remote for corpus in self.corpora)

    def input_order(self) -> NDArray[np.int64]:
        """Returns the indices of all cuts, corpus by corpus, in the order of the inputs."""
        firsts = self._first_indices
        return np.concatenate([first + each.input_order() for first, each in zip(firsts, self.corpora, strict=False)])

    def locate(self, index: int) -> tuple[Corpus, int]:
        """Returns the corpus of a cut, and its index there.

        Raises:
            IndexError: There is no such cut.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} cuts")
        number = bisect_right(self._first_indices, index) - 1
        return self.corpora[number], index - self._first_indices[number]


def open_corpus(given: str | os.PathLike[str] | Corpus | Any) -> Corpus:
    """Returns one corpus; a directory is opened.

    Raises:
        CorpusError: A path is not a corpus directory, the corpus is damaged, or something else is given.
    """
    if isinstance(given, Corpus):
        return given
    if isinstance(given, (str, os.PathLike)):
        return Corpus.open(Path(given))
    raise CorpusError(
        f"{type(given).__name__} where a corpus was expected ({given!r:.80}). Give the path of a corpus directory or a "
        "Corpus; cuts and manifests become one with prepare_corpus(cuts, 'NAME.corpus')."
    )


def spread_over(corpus: Corpus | Corpora, most: int) -> list[tuple[Corpus, int]]:
    """Returns at most `most` cuts, each as a corpus and its index there, evenly spread from the shortest on."""
    corpora = corpus if isinstance(corpus, Corpora) else Corpora([corpus])
    return [corpora.locate(index) for index in np.unique(np.linspace(0, len(corpora) - 1, most).astype(int)).tolist()]
