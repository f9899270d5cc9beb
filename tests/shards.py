"""Corpora whose audio is in one tar, made of the files of a folder, for tests that need no reader of tars."""

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import nestdata.prepare.run
from nestdata import Corpus, PrepareConfig, prepare_corpus
from nestdata.input_format import InputFormat
from nestdata.prepare.inputs.entry import Entry, Member
from nestdata.storage import ObjectInfo


def write_tar(tar: Path, folder: Path, names: Sequence[str] | None = None) -> dict[str, Member]:
    """Writes files of a folder, by default all, to a tar; returns the members by name."""
    names = (
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        if names is None
        else names
    )
    tar.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(tar, "w", format=tarfile.PAX_FORMAT) as writer:
        for name in names:
            writer.add(folder / name, name)  # with a PAX header before each member, for the fraction of its time
    info = ObjectInfo(str(tar), tar.stat().st_size, None)
    with tarfile.open(tar) as reader:
        places = {name: (reader.getmember(name).offset_data, reader.getmember(name).size) for name in names}
    return {name: Member(info, *place) for name, place in places.items()}


@dataclass(frozen=True)
class Members:
    """A source of the members of a tar, in order."""

    path: Path
    found: tuple[Entry, ...]
    items_per_task: ClassVar[None] = None
    format: ClassVar[InputFormat] = "webdataset"

    def items(self) -> Iterator[int]:
        """Yields numbers of entries."""
        yield from range(len(self.found))

    def entries(self, number: int, item: int) -> Iterator[Entry]:  # noqa: ARG002
        """Yields the entry of a number."""
        yield self.found[item]

    def where(self, number: int) -> str:
        """Returns the path and a number."""
        return f"{self.path}:{number}"

    def count(self) -> int:
        """Returns the number of entries."""
        return len(self.found)


def entries_of(members: dict[str, Member]) -> list[Entry]:
    """Returns one entry for each member, with the name without suffix as its id."""
    return [Entry(f"m:{i}", str(Path(name).with_suffix("")), at) for i, (name, at) in enumerate(members.items())]


def corpus_of(output: Path, entries: Sequence[Entry], config: PrepareConfig | None = None) -> Corpus:
    """Prepares a corpus of entries."""
    with patch.object(nestdata.prepare.run, "open_sources", lambda *_: [Members(output, tuple(entries))]):
        prepare_corpus([output.with_suffix(".tar")], output, config, overwrite=True)
    return Corpus.open(output)


def tar_corpus(folder: Path, config: PrepareConfig | None = None) -> Corpus:
    """Packs a folder of audio into `FOLDER.tar` and prepares the corpus `FOLDER.tarred` of it."""
    members = write_tar(folder.with_suffix(".tar"), folder)
    return corpus_of(folder.with_suffix(".tarred"), entries_of(members), config)
