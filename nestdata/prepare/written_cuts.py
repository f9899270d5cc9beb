"""The cuts of a corpus that is being written: their dicts and their samples, for the sample bank and the report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nestdata.audio.decode import empty_samples, load_samples
from nestdata.corpus.addresses import Address, AddressTable
from nestdata.corpus.members import load_member
from nestdata.output import path_before_move
from nestdata.storage import is_url


class WrittenCuts:
    """The cuts in the order of the index.

    Args:
        directory: The directory that holds the cuts, their index and their addresses.
        stored_in: Its path once the corpus is in place; paths of audio in it already start with that.
        meta: The content of `meta.json`, which may be written later.
    """

    def __init__(self, directory: Path, stored_in: Path, meta: Mapping[str, Any]) -> None:
        self.lengths, self._offsets = np.load(directory / "index.npy", mmap_mode="r")
        self._directory, self._stored_in = directory, stored_in
        self._addresses = AddressTable.open(directory, meta)

    def row(self, index: int) -> dict[str, Any]:
        """Returns a cut as a dict; may be called by several threads."""
        with (self._directory / "cuts.jsonl").open("rb") as file:
            file.seek(int(self._offsets[index]))
            row: dict[str, Any] = orjson.loads(file.readline())
        return row

    def is_remote(self, index: int) -> bool:
        """Returns whether the audio of a cut is in an object store."""
        address = self._address(index)
        return address is not None and is_url(address.location)

    def load(self, index: int, num_samples: int) -> NDArray[np.float32]:
        """Returns the first samples of a cut, shape (num_samples,); may be called by several threads.

        Raises:
            AudioError: They cannot be decoded.
            StorageError: Bytes cannot be read for a reason that says nothing about the cut.
        """
        row = self.row(index)
        for source in row["recording"]["sources"]:
            source["source"] = self._now(str(source["source"]))
        samples = empty_samples(row["id"], num_samples)
        if address := self._address(index):
            load_member(row, address._replace(location=self._now(address.location)), None, start=0, out=samples)
            return samples
        return load_samples(row, num_samples=num_samples, out=samples)

    def _address(self, index: int) -> Address | None:
        return self._addresses[index] if self._addresses else None

    def _now(self, location: str) -> str:
        return path_before_move(location, self._stored_in, self._directory)
