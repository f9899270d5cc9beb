"""Bytes of members: fetched from their shards, checked, and decoded."""

from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.decode import load_samples
from nestdata.corpus.addresses import Address
from nestdata.errors import AudioError, StorageError
from nestdata.storage import ObjectInfo, Storage, is_url, storage

_TAR_BLOCK = 512
# Largest number of reads of bytes that were damaged in transfer. If the shard itself is damaged, two reads agree.
_MAX_READS = 5


class MemberBytes(NamedTuple):
    """The bytes of a member, if the caller has read them. They have no effect on audio that is not a member."""

    content: bytes | None = None
    """The bytes; by default, they are read when they are needed. Damaged bytes are read again."""

    is_checked: bool = False
    """Whether `content` is known to be intact, see `is_intact`."""

    store: Storage | None = None
    """Reads bytes, with its own timeouts and limits; `storage()` by default."""


UNREAD = MemberBytes()
"""Bytes that the caller has not read."""


def fetch(address: Address, cut_id: str, given: MemberBytes = UNREAD) -> bytes:
    """Returns the bytes of a member; damaged ones are read again until two reads agree.

    Args:
        address: Where the member is.
        cut_id: Names the cut in messages.
        given: The bytes if they have been read already. They are returned if they are intact.

    Raises:
        AudioError: The shard is missing or has changed, or its bytes do not have the checksum in the corpus.
        StorageError: The shard cannot be read for another reason, which says nothing about the cut.
    """
    content = given.content
    if content is not None and (given.is_checked or is_intact(address, content)):
        return content
    for _ in range(_MAX_READS):
        before, content = content, _read(address, cut_id, given.store)
        if is_intact(address, content):
            return content
        if content == before:
            raise AudioError.because(
                "corrupt",
                f"cut {cut_id!r}: {describe(*address[:3])} do not have the checksum that the corpus says, read twice. "
                "Restore the shard, or prepare the corpus again.",
            )
    raise _unsteady(address, cut_id)


def read_intact(address: Address, store: Storage) -> bytes | None:
    """Returns the bytes of a member, read once; None if they are missing, changed or damaged, which `fetch` judges.

    Raises:
        StorageError: The shard cannot be read for a reason that says nothing about the member.
    """
    try:
        content = address.read(store)
    except StorageError as error:
        if error.kind in ("missing", "changed"):
            return None
        raise
    return content if is_intact(address, content) else None


def load_member(
    line: dict[str, Any],
    address: Address,
    given: MemberBytes = UNREAD,
    *,
    start: int,
    out: NDArray[np.float32],
) -> None:
    """Fills `out` with samples of a cut that has an address.

    Args:
        line: The cut as a dict.
        address: Where the bytes of its audio file are.
        given: These bytes if the caller has read them.
        start: First sample to load, counted from the start of the cut.
        out: Array that receives the samples, shape (num_samples,).

    Raises:
        AudioError: The audio cannot be used; the message names the cut.
        StorageError: As for `fetch`.
    """
    content, unread = fetch(address, line["id"], given), MemberBytes(store=given.store)
    for _ in range(_MAX_READS):
        try:
            load_samples(line, start=start, num_samples=len(out), out=out, content=content)
            return
        except AudioError:
            # Without a checksum, only the decoder notices bytes that were damaged in transfer.
            if address.crc32 is not None or (again := fetch(address, line["id"], unread)) == content:
                raise
            content = again
    raise _unsteady(address, line["id"])


def is_intact(address: Address, content: bytes) -> bool:
    """Returns whether bytes have the length and, if it is known, the checksum of a member."""
    return len(content) == address.length and (address.crc32 is None or crc32(content) == address.crc32)


def describe(location: str, offset: int, length: int) -> str:
    """Returns a range of bytes for messages, such as `bytes 512 to 9000 of s3://bucket/a.tar`."""
    return f"bytes {offset} to {offset + length} of {location}"


def source_at(shard: ObjectInfo, offset: int, length: int) -> dict[str, Any]:
    """Returns type and source of a Lhotse `AudioSource` for the bytes of an audio file.

    A whole file is its path or URL. A member of a tar is a pointer that Lhotse 2 loads: it seeks to the header of the
    member, which takes the 512 bytes before the content in every kind of tar, and reads the length there.
    """
    location = shard.location
    if offset == 0 and length == shard.size:
        return {"type": "url" if is_url(location) else "file", "source": location}
    end = offset + -(-length // _TAR_BLOCK) * _TAR_BLOCK
    return {"type": "shar_ptr", "source": f"{location}?o={max(0, offset - _TAR_BLOCK)}&e={end}"}


def point_to(line: dict[str, Any], address: Address) -> None:
    """Sets the source of the channel of a cut to an address; modifies `line`."""
    for source in line["recording"]["sources"]:
        if line["channel"] in source["channels"]:
            shard = ObjectInfo(address.location, address.shard_size, address.etag)
            source.update(source_at(shard, address.offset, address.length))


def _read(address: Address, cut_id: str, store: Storage | None) -> bytes:
    try:
        return address.read(store or storage())
    except StorageError as error:
        # A store that does not answer, or refuses its credentials, says nothing about the cut. The run must end then:
        # otherwise, a batch would depend on the network.
        if error.kind not in ("missing", "changed"):
            raise
        raise AudioError.because(
            error.kind,
            f"cut {cut_id!r}: {describe(*address[:3])} cannot be read: {error} "
            "Restore the shard, or prepare the corpus again.",
        ) from error


def _unsteady(address: Address, cut_id: str) -> StorageError:
    """Returns the error for bytes that were damaged in transfer, which says nothing about the cut."""
    return StorageError.because(
        "unavailable",
        f"cut {cut_id!r}: {describe(*address[:3])} arrive damaged, and differently each time ({_MAX_READS} reads). "
        "Check the network and the memory of this machine.",
    )
