"""A prepared corpus: a directory of cuts with an index sorted by length, written once and opened by every process.

    meta.json        format version, sampling rate, counts, hours, settings, content fingerprint
    cuts.jsonl       Lhotse MonoCuts, one a line, in the order of the input
    index.npy        int64 (2, num_cuts), sorted by length: samples of each cut, and where its line starts
    rejected.jsonl   every input that was left out: where it stood, and why

Both large files are memory-mapped, so that opening costs the same for any size, all processes share the pages,
and a corpus can be used after a fork. How one is written is the business of `prepare`.
"""

import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
from lhotse import MonoCut
from numpy.typing import NDArray

from nestdata.errors import CorpusError

FORMAT_VERSION = 1


class Corpus:
    """Cuts by rank of length: `corpus[0]` is the shortest, `corpus[-1]` the longest."""

    path: Path
    meta: dict[str, Any]

    def __init__(self, path: Path, meta: dict[str, Any], index: NDArray[np.int64], lines: mmap.mmap) -> None:
        self.path = path
        self.meta = meta
        self._index = index
        self._lines = lines

    @classmethod
    def open(cls, path: str | Path) -> "Corpus":
        """Opens a corpus directory without reading its cuts.

        Raises:
            CorpusError: There is no corpus at this path, it was written in another format, or a part is missing.
        """
        path = Path(path)
        if not (path / "meta.json").is_file():
            found = "is not a corpus (it has no meta.json)" if path.exists() else "does not exist"
            raise CorpusError(f"{path}: {found}. Make one with `nestdata prepare MANIFEST -o {path}`.")
        try:
            meta = json.loads((path / "meta.json").read_text())
            if meta["format_version"] != FORMAT_VERSION:
                raise CorpusError(
                    f"{path}: written in format {meta['format_version']}, this version reads format {FORMAT_VERSION}. "
                    "Prepare it again."
                )
            index = np.load(path / "index.npy", mmap_mode="r")
            with (path / "cuts.jsonl").open("rb") as file:
                lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if index.shape != (2, meta["num_cuts"]) or len(lines) != meta["num_bytes"]:
                raise ValueError("index.npy or cuts.jsonl is not the size that meta.json says")
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{path}: the corpus is damaged ({error}). Prepare it again.") from error
        return cls(path, meta, index, lines)

    @property
    def num_samples(self) -> NDArray[np.int64]:
        """Length of every cut in samples at `sampling_rate`, ascending, shape (num_cuts,); memory-mapped."""
        lengths: NDArray[np.int64] = self._index[0]
        return lengths

    @property
    def sampling_rate(self) -> int:
        """Rate in Hz at which the cuts are loaded."""
        return int(self.meta["sampling_rate"])

    @property
    def fingerprint(self) -> str:
        """Names the content: the ids, places, channels and lengths of all cuts, but not the folder they lie in."""
        return str(self.meta["fingerprint"])

    @property
    def hours(self) -> float:
        """Hours of audio in all cuts together."""
        return float(self.meta["hours"])

    def __len__(self) -> int:
        return int(self.meta["num_cuts"])

    def __getitem__(self, row: int) -> MonoCut:
        """Returns the row-th shortest cut, read from disk at a cost that does not depend on the size."""
        num_cuts = len(self)
        if not -num_cuts <= row < num_cuts:
            raise IndexError(f"row {row} of a corpus of {num_cuts} cuts")
        start = int(self._index[1, row])
        try:
            data = json.loads(self._lines[start : self._lines.find(b"\n", start)])
            del data["type"]
            return MonoCut.from_dict(data)
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"{self.path}: the line of cuts.jsonl at byte {start} is damaged ({error}). Prepare the corpus again."
            ) from error

    def __repr__(self) -> str:
        return f"Corpus({str(self.path)!r}, {len(self)} cuts, {self.hours:.2f} h, {self.sampling_rate} Hz)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Corpus.open, (self.path,)
