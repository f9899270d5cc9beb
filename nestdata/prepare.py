"""Manifests in, one corpus directory out: written beside its target, flushed, and renamed into place when whole.

A killed run leaves the old corpus or the new one at the target, never a mixture; what it had begun lies in
`NAME.partial` and is cleared by the next run. Two runs into one target: the second is refused.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lhotse import MonoCut

from nestdata.corpus import FORMAT_VERSION
from nestdata.errors import ConfigError, CorpusError, ManifestError
from nestdata.manifest import common_root, count_entries, read_manifest
from nestdata.probe import Limits, Reject, probe


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig:
    """What a corpus takes in, and how its audio will be read."""

    sampling_rate: int = 16000
    """Rate in Hz at which cuts are loaded; files of another rate are resampled when they are read."""

    channel: int = 0
    """Channel that is read from files with several, counted from 0. Lhotse cuts name their own."""

    min_seconds: float = 0.1
    """Shorter cuts are left out."""

    max_seconds: float | None = None
    """Longer cuts are left out; None keeps all."""

    def __post_init__(self) -> None:
        if self.sampling_rate < 1:
            raise ConfigError(f"sampling_rate is {self.sampling_rate}: give a rate in Hz, such as 16000.")
        if self.channel < 0:
            raise ConfigError(f"channel is {self.channel}: channels are counted from 0.")
        if self.min_seconds < 0:
            raise ConfigError(f"min_seconds is {self.min_seconds}: a duration cannot be negative.")
        if self.max_seconds is not None and self.max_seconds < self.min_seconds:
            raise ConfigError(
                f"max_seconds ({self.max_seconds:g}) is below min_seconds ({self.min_seconds:g}): no cut would be left."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareReport:
    """What a run of `prepare` took in and left out."""

    path: Path
    num_cuts: int
    hours: float
    shortest_s: float
    longest_s: float
    num_resampled: int
    rejected: dict[str, int] = field(default_factory=dict)
    """Number of rejects by reason; each one is a line of `rejected.jsonl`."""


def prepare(
    manifests: Sequence[str | Path],
    output: str | Path,
    config: PrepareConfig | None = None,
    *,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> PrepareReport:
    """Writes one corpus from one or many manifests.

    Args:
        manifests: NeMo JSONL files, Lhotse cuts, or folders of audio; they may be mixed.
        output: The corpus directory to make.
        config: Limits and target rate.
        overwrite: Whether an existing corpus at `output` is replaced, which happens at the end and at once.
        on_progress: Called with the number of entries looked at and their total.

    Raises:
        ManifestError: A manifest cannot be read, or none of the audio can be used. Nothing is left behind.
        CorpusError: The target exists, or another run is writing it.
    """
    config = config or PrepareConfig()
    output = Path(output).resolve()
    sources = [Path(manifest) for manifest in manifests]
    _check_target(output, overwrite)
    total = sum(count_entries(source) for source in sources)
    root = common_root(sources)
    with _partial_directory(output) as partial:
        with closing(_Writer(partial, config)) as writer:
            for source in sources:
                for entry in read_manifest(source, root):
                    writer.add(probe(entry, writer.limits), entry.where)
                    if on_progress:
                        on_progress(writer.num_seen, total)
            report = writer.finish(output, sources)
        for path in (*partial.iterdir(), partial):
            _flush(path)
        _check_target(output, overwrite)  # once more: another run may have finished meanwhile
        _move_into_place(partial, output)
    return report


def _check_target(output: Path, overwrite: bool) -> None:
    if output.exists() and not (overwrite and (output / "meta.json").is_file()):
        advice = "Choose another place." if overwrite else "Choose another place, or pass --overwrite to replace it."
        raise CorpusError(f"{output}: exists already. {advice}")


class _Writer:
    """Writes the files of a corpus, holding 16 bytes a cut beside the ids that were seen."""

    def __init__(self, directory: Path, config: PrepareConfig) -> None:
        self.limits = Limits(
            sampling_rate=config.sampling_rate,
            channel=config.channel,
            min_seconds=config.min_seconds,
            max_seconds=config.max_seconds,
        )
        self.num_seen = 0
        self._directory = directory
        self._config = config
        self._cuts = (directory / "cuts.jsonl").open("wb")
        # Names of files may hold bytes that are not Unicode; JSON has escapes for them.
        self._rejected = (directory / "rejected.jsonl").open("w", encoding="utf-8", errors="backslashreplace")
        self._num_samples = array("q")
        self._offsets = array("q")
        self._reasons: Counter[str] = Counter()
        self._num_resampled = 0
        self._ids: set[bytes] = set()
        self._content = hashlib.blake2b(digest_size=16)
        self._first_reject: Reject | None = None

    def add(self, found: MonoCut | Reject, where: str) -> None:
        self.num_seen += 1
        reject = self._add_cut(found, where) if isinstance(found, MonoCut) else found
        if reject:
            self._first_reject = self._first_reject or reject
            self._reasons[reject.reason] += 1
            self._rejected.write(json.dumps(asdict(reject), ensure_ascii=False) + "\n")

    def _add_cut(self, cut: MonoCut, where: str) -> Reject | None:
        try:
            line = json.dumps(cut.to_dict(), ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError as error:
            return Reject(where, cut.id, "unreadable", f"its name or a label is not Unicode: {error}")
        digest = hashlib.blake2b(cut.id.encode(), digest_size=8).digest()
        if digest in self._ids:
            return Reject(where, cut.id, "duplicate_id", f"the id {cut.id!r} stands for an earlier cut already")
        self._ids.add(digest)
        self._num_samples.append(cut.num_samples)
        self._offsets.append(self._cuts.tell())
        self._num_resampled += bool(cut.recording.transforms)
        self._cuts.write(line)
        self._content.update(f"{cut.id}\t{cut.start:.6f}\t{cut.channel}\t{cut.num_samples}\n".encode())
        return None

    def finish(self, output: Path, sources: Sequence[Path]) -> PrepareReport:
        if not self._num_samples:
            example = self._first_reject
            why = f"; the first: {example.where}: {example.reason}, {example.detail}" if example else ""
            raise ManifestError(
                f"{', '.join(map(str, sources))}: no usable cut among {self.num_seen} entries{why}. "
                "Check the paths, which are taken relative to the manifest, and the limits on duration."
            )
        num_bytes = self._cuts.tell()
        lengths, offsets = (np.frombuffer(a, dtype=np.int64) for a in (self._num_samples, self._offsets))
        order = np.argsort(lengths, kind="stable")
        np.save(self._directory / "index.npy", np.stack([lengths[order], offsets[order]]))
        rate = self._config.sampling_rate
        report = PrepareReport(
            path=output,
            num_cuts=len(lengths),
            hours=float(lengths.sum()) / rate / 3600,
            shortest_s=float(lengths.min()) / rate,
            longest_s=float(lengths.max()) / rate,
            num_resampled=self._num_resampled,
            rejected=dict(self._reasons.most_common()),
        )
        meta = self._meta(report, num_bytes, sources)
        (self._directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        return report

    def close(self) -> None:
        self._cuts.close()
        self._rejected.close()

    def _meta(self, report: PrepareReport, num_bytes: int, sources: Sequence[Path]) -> dict[str, Any]:
        self._content.update(str(self._config.sampling_rate).encode())
        return {
            "format_version": FORMAT_VERSION,
            "sampling_rate": self._config.sampling_rate,
            "num_cuts": report.num_cuts,
            "num_bytes": num_bytes,
            "hours": report.hours,
            "fingerprint": self._content.hexdigest(),
            "rejected": report.rejected,
            "manifests": [str(source) for source in sources],
            "settings": asdict(self._config),
        }


@contextmanager
def _partial_directory(output: Path) -> Iterator[Path]:
    """An empty directory beside the target, locked for as long as it is written, and removed on an error."""
    partial = output.with_name(output.name + ".partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusError(f"{output}: cannot be written ({error.strerror}). Choose another place.") from error
    with _locked(partial, output):
        _clear(partial)
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def _locked(directory: Path, output: Path) -> Iterator[None]:
    """Holds a lock on a directory, which the system lets go of when the process ends, however it ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another run may have renamed the directory into place between the two calls.
        if not directory.exists() or not os.path.samestat(os.fstat(descriptor), directory.stat()):
            raise BlockingIOError
        yield
    except BlockingIOError:
        raise CorpusError(f"{output}: another prepare is writing it. Wait for it, or choose another place.") from None
    finally:
        os.close(descriptor)


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _move_into_place(partial: Path, output: Path) -> None:
    if output.exists():
        # The old corpus takes the partial's name, and is cleared with it; the lock keeps other runs off until then.
        with _locked(output, output):
            _exchange(partial, output)
            shutil.rmtree(partial)
    else:
        partial.rename(output)
    _flush(output.parent)


def _exchange(first: Path, second: Path) -> None:
    """Swaps two directories in one step, so that there is no moment without a corpus at the target."""
    current_directory, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    libc = ctypes.CDLL(None, use_errno=True)
    names = (current_directory, os.fsencode(first), current_directory, os.fsencode(second), exchange)
    if not hasattr(libc, "renameat2") or libc.renameat2(*names) != 0:
        # Not Linux, or a file system that cannot swap: the old corpus steps aside for an instant.
        aside = first.with_name(first.name + ".old")
        second.rename(aside)
        first.rename(second)
        aside.rename(first)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
