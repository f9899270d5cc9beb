"""A prepared corpus: a directory of cuts with an index sorted by length, written once and opened by every process.

    meta.json        format version, sampling rate, counts, hours, settings, content fingerprint
    cuts.jsonl       Lhotse MonoCuts, one per line, in the order of the input
    index.npy        int64 (2, num_cuts), sorted by length: samples of each cut, and the byte at which its line starts
    rejected.jsonl   every rejected entry: its position in the input, and the reason
    notes.jsonl      entries that are used, but changed or doubtful; absent if there are none
    report.html      durations, hours by rate and language, rejects, and samples, which are in the folder `report`
    bank.pcm, .npy   with `--pcm`, all samples (see `nestdata.corpus.bank`)
    addresses.npy    where the bytes of each cut are, with audio in tars or object stores (see
                     `nestdata.corpus.addresses`, which also describes checksums.npy, shards.jsonl and shards.npy)
    versions.npy     size and time of local files (see `nestdata.corpus.file_version`)

The large files are memory-mapped: opening takes the same time for every size, all processes share the memory
pages, and a corpus can be used after a fork. Corpora are written by `nestdata.prepare`.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.decode import empty_samples, load_samples, samples_in
from nestdata.corpus.addresses import NO_SHARD, Address, AddressTable, Shard
from nestdata.corpus.bank import SampleBank
from nestdata.corpus.file_version import VERSION, check_version
from nestdata.corpus.members import UNREAD, MemberBytes, load_member, point_to
from nestdata.corpus.meta import map_array, meta_content, parse_line, read_meta
from nestdata.errors import ConfigError, CorpusError
from nestdata.storage import FileVersion, is_url, storage
from nestdata.wrong_path import wrong_path


class Corpus:
    """Cuts indexed by length: `corpus[0]` is the shortest, `corpus[-1]` the longest."""

    def __init__(self, path: str | Path, root: str | None = None) -> None:
        """Opens a corpus directory; `open` explains the arguments and errors."""
        path = Path(path)
        if not (path / "meta.json").is_file():
            raise CorpusError(f"{path}: {wrong_path(path, 'a corpus')}")
        self.path = path
        """The directory."""

        try:
            self.meta = read_meta(path)
            """The content of `meta.json`."""

            num_cuts, versions = self.meta["num_cuts"], path / "versions.npy"
            self._index = map_array(path / "index.npy", np.int64, (2, num_cuts))
            with (path / "cuts.jsonl").open("rb") as file:
                self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if len(self._lines) != self.meta["num_bytes"]:
                raise ValueError("cuts.jsonl is not the size that meta.json says")
            self._bank = SampleBank(path, self._index[0]) if (path / "bank.npy").is_file() else None
            self._addresses = AddressTable.open(path, self.meta, root)
            self._versions = map_array(versions, VERSION, (num_cuts,)) if versions.is_file() else None
        except (OSError, ValueError) as error:
            raise _damaged(path, error) from error

    @classmethod
    def open(cls, path: str | Path, *, root: str | None = None) -> "Corpus":
        """Opens a corpus directory without reading its cuts.

        Args:
            path: The directory.
            root: Where the folder or bucket of the audio is now, if it was moved after preparing; an absolute path or
                a URL. By default, the root in `meta.json`. Has no effect on cuts without an address.

        Raises:
            CorpusError: The path is not a corpus directory, the corpus has another format version, or a part of it is
                missing or damaged.
        """
        return cls(Path(path), root)

    @property
    def num_samples(self) -> NDArray[np.int64]:
        """Length of every cut in samples at `sampling_rate`, ascending, shape (num_cuts,); memory-mapped."""
        lengths: NDArray[np.int64] = self._index[0]
        return lengths

    @property
    def sampling_rate(self) -> int:
        """Sampling rate in Hz at which the cuts are loaded."""
        return int(self.meta["sampling_rate"])

    @property
    def fingerprint(self) -> str:
        """Identifies the content: ids, offsets, channels and lengths of all cuts, but not the location of the audio."""
        return str(self.meta["fingerprint"])

    @property
    def hours(self) -> float:
        """Total duration of all cuts in hours."""
        return float(self.meta["hours"])

    @property
    def has_bank(self) -> bool:
        """Whether the corpus was prepared with `--pcm`, so that its cuts are read without decoding."""
        return self._bank is not None

    @property
    def root(self) -> str | None:
        """The location that the names of shards are relative to; None if no cut has an address."""
        return None if self._addresses is None else self._addresses.root

    @property
    def is_remote(self) -> bool:
        """Whether audio is read from an object store. A corpus with a sample bank does not need the store."""
        if self._addresses is None or self.has_bank:
            return False
        # Without a common root, which may have moved, the names of all shards are absolute.
        return is_url(self._addresses.root) if self._addresses.root else bool(self.meta["shards"]["has_urls"])

    @property
    def is_moved(self) -> bool:
        """Whether the audio was moved after the corpus was prepared; `cuts.jsonl` then says where it was before."""
        return self._addresses is not None and self._addresses.is_moved

    @property
    def num_shards(self) -> int:
        """Number of files and objects that hold the audio of cuts with an address."""
        return 0 if self._addresses is None else self._addresses.num_shards

    def shards(self) -> Iterator[Shard]:
        """Yields all shards in the order of their numbers.

        Raises:
            CorpusError: `shards.jsonl` is damaged.
        """
        try:
            yield from () if self._addresses is None else self._addresses.shards()
        except ValueError as error:
            raise _damaged(self.path, error) from error

    def write_root(self) -> None:
        """Writes the root that the corpus was opened with to `meta.json`, where the next `open` finds it.

        Has no effect on processes that have the corpus open.

        Raises:
            StorageError: The file cannot be written.
        """
        assert self.root, "only corpora whose audio has a root can be moved"
        self.meta = self.meta | {"root": self.root}
        storage().write(str(self.path.resolve() / "meta.json"), meta_content(self.meta))

    def reopen(self) -> "Corpus":
        """Opens the directory again; raises CorpusError if it was removed, cut off or prepared again meanwhile."""
        return _reopen(self.path, self.root, self.fingerprint)

    def __len__(self) -> int:
        return int(self.meta["num_cuts"])

    def __getitem__(self, index: int) -> Any:
        """Returns a cut as a Lhotse `MonoCut`, counted from the shortest; the cost does not depend on the corpus size.

        Raises:
            IndexError: The corpus has no such cut.
            CorpusError: The line of the cut is damaged.
        """
        from lhotse import MonoCut  # slow to import, and not needed to plan or train

        fields = self.line(index)
        try:
            del fields["type"]
            return MonoCut.from_dict(fields)
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged_line(index, error) from error

    def num_samples_of(self, index: int) -> int:
        """Returns the length of one cut in samples."""
        return int(self._index[0, index])

    def input_order(self) -> NDArray[np.int64]:
        """Returns the indices of all cuts in the order of `cuts.jsonl`, shape (num_cuts,)."""
        order: NDArray[np.int64] = np.argsort(self._index[1], kind="stable")
        return order

    def shard_numbers(self) -> NDArray[np.int64]:
        """Returns the number of the shard of every cut, `NO_SHARD` for a cut without an address, shape (num_cuts,)."""
        return np.full(len(self), NO_SHARD) if self._addresses is None else self._addresses.shard_numbers()

    def check_rate(self, other: "Corpus") -> None:
        """Raises ConfigError if two corpora that are used together have different sampling rates."""
        if self.sampling_rate != other.sampling_rate:
            raise ConfigError(
                f"{self.path} is at {self.sampling_rate} Hz and {other.path} at {other.sampling_rate} Hz. "
                f"Prepare the first one again with --sampling-rate {other.sampling_rate}."
            )

    def line(self, index: int) -> dict[str, Any]:
        """Returns a cut as the dict that Lhotse's `MonoCut.to_dict` would return, read from `cuts.jsonl`.

        If the audio was moved, the source of a cut with an address is where it is now.

        Raises:
            IndexError: The corpus has no such cut.
            CorpusError: The line is damaged.
        """
        self._check_index(index)
        start = int(self._index[1, index])
        try:
            fields = parse_line(self._lines[start : self._lines.find(b"\n", start)], self.sampling_rate)
            if samples_in(fields["duration"], self.sampling_rate) != self._index[0, index]:
                raise ValueError("index.npy gives another length")
        except ValueError as error:
            raise self._damaged_line(index, error) from error
        if self._addresses is not None and self._addresses.is_moved and (address := self.address(index)):
            point_to(fields, address)
        return fields

    def address(self, index: int) -> Address | None:
        """Returns where the bytes of the audio file of a cut are; None if it is read by the path in its line.

        Raises:
            IndexError: The corpus has no such cut.
            CorpusError: The address is damaged.
        """
        self._check_index(index)
        if self._addresses is None:
            return None
        try:
            return self._addresses[index]
        except ValueError as error:
            raise _damaged(self.path, error) from error

    def file_version(self, index: int) -> FileVersion | None:
        """Returns the version of the file of a cut when the corpus was prepared; None if it is unknown.

        It is unknown for cuts with an address, and for files that were not opened.
        """
        version = FileVersion(0, 0) if self._versions is None else FileVersion(*self._versions[index].item())
        return version if any(version) else None

    def check_file(self, index: int, line: dict[str, Any]) -> None:
        """Checks that the file of a cut was not replaced, if its version is known.

        Args:
            index: Index of the cut.
            line: The cut as `line` returns it.

        Raises:
            AudioError: "changed": the file has another size or modification time.
        """
        if version := self.file_version(index):
            check_version(line, version)

    def write_file_versions(self, versions: Iterable[tuple[int, FileVersion]]) -> None:
        """Writes new versions of the files of some cuts, given by index, where the next `open` finds them.

        Raises:
            StorageError: The file cannot be written.
        """
        assert self._versions is not None, "only versions that are known can change"
        rows, content = np.array(self._versions), BytesIO()
        for index, version in versions:
            rows[index] = tuple(version)
        np.save(content, rows)
        storage().write(str(self.path.resolve() / "versions.npy"), content.getvalue())

    def load(
        self,
        index: int,
        *,
        start: int = 0,
        num_samples: int | None = None,
        out: NDArray[np.float32] | None = None,
        on_cut: Callable[[str], None] | None = None,
        given: MemberBytes = UNREAD,
    ) -> tuple[str, NDArray[np.float32]]:
        """Returns the id of a cut and its samples, or a span of them, shape (num_samples,).

        Args:
            index: Index of the cut, counted from the shortest.
            start: First sample to load, counted from the start of the cut.
            num_samples: Number of samples to load; by default, all up to the end of the cut.
            out: Array that receives the samples; a new array by default.
            on_cut: Called with the id of the cut before its audio is decoded, for instance to refresh a heartbeat.
            given: The bytes at the address of the cut, if the caller has read them; by default, they are read here.
                Has no effect on a cut without an address.

        Raises:
            AudioError: The audio cannot be used; the message names the cut.
            StorageError: The bytes cannot be read for a reason that says nothing about the cut, such as a store that
                does not answer.
            IndexError: The corpus has no such cut.
            CorpusError: The line or the address of the cut is damaged.
        """
        line = self.line(index)
        if on_cut is not None:
            on_cut(line["id"])
        if out is None:
            out = empty_samples(line["id"], self.num_samples_of(index) - start if num_samples is None else num_samples)
        if self._bank is not None:
            self._bank.read(index, line["id"], start, out)
        elif address := self.address(index):
            load_member(line, address, given, start=start, out=out)
        else:
            self.check_file(index, line)
            load_samples(line, start=start, num_samples=len(out), out=out)
        return line["id"], out

    def _check_index(self, index: int) -> None:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of a corpus of {len(self)} cuts")

    def _damaged_line(self, index: int, error: Exception) -> CorpusError:
        return CorpusError(
            f"{self.path}: the line of cuts.jsonl at byte {self._index[1, index]} is damaged ({error}). "
            "Prepare the corpus again."
        )

    def __repr__(self) -> str:
        return f"Corpus({str(self.path)!r}, {len(self)} cuts, {self.hours:.2f} h, {self.sampling_rate} Hz)"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.root, self.fingerprint)


def _damaged(path: Path, error: Exception) -> CorpusError:
    return CorpusError(f"{path}: the corpus is damaged ({error}). Prepare it again.")


def _reopen(path: Path, root: str | None, fingerprint: str) -> Corpus:
    """Opens a corpus in another process, which has to find the cuts that the first process has planned with."""
    corpus = Corpus.open(path, root=root)
    if corpus.fingerprint != fingerprint:
        raise CorpusError(
            f"{path}: was prepared again, with other cuts, while a run was reading it. Resume the run with the earlier "
            "corpus, or start a new one."
        )
    return corpus
