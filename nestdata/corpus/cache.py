"""`PinnedCache`: a share of the bytes of remote corpora on a local disk, shared by all processes of a node.

Every cut is read about once an epoch, so a cache that evicts would drop nearly all bytes before they are read again.
Here, the share that fits is chosen by a hash, and stays: these members are pinned.

    CACHE/0a3/0a3f...     the bytes of a member, and in the last four bytes their crc32 combined with the address
    CACHE/partial/        files that are being written, NAME.WRITER; a complete one is renamed

Only regular files of the user are read, and links are not followed, so what other users put there is neither waited for
nor used. If the corpus has checksums, the bytes are compared with them as well.
"""

import contextlib
import errno
import logging
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

from nestdata.corpus.addresses import Address
from nestdata.corpus.corpora import Corpora
from nestdata.corpus.corpus import Corpus

_log = logging.getLogger(__name__)

_CHECKSUM = struct.Struct("<I")
# Bounds the time to open a corpus of any size.
_MAX_SAMPLED = 2000
# Seconds after which an incomplete file was left behind by a process that was killed.
_STALE_S = 3600.0
# Neither follows a link nor waits for a pipe.
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# Names of files that are being written: the hash of an address, a process and a thread.
_UNFINISHED = re.compile(r"[0-9a-f]{32}\.\d+-\d+")
# Errors of opening a link or a socket.
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO)


class PinnedCache:
    """Files with the bytes of members, written once and checked on every read. Thread-safe.

    If the disk is full or fails, nothing more is written, and `failure` says why; reading goes on.

    Args:
        directory: On a disk of this node; created if it is missing.
    """

    failure: str = ""
    """Why nothing more is written; empty while the cache works."""

    def __init__(self, directory: Path) -> None:
        self._directory = Path(directory)
        self._partial = self._directory / "partial"
        try:
            self._partial.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
        except OSError as error:
            self._give_up(error)

    def get(self, address: Address) -> bytes | None:
        """Returns the bytes at an address, or None if the cache does not hold them. Drops anything else found there."""
        try:
            data = _read_own(self._path(address), address.length + _CHECKSUM.size)
        except OSError as error:
            if error.errno not in _NOT_A_FILE:
                return None
            data = b""
        content, checksum = data[: address.length], crc32(data[: address.length])
        is_complete = data[address.length :] == _trailer(address, checksum)
        if is_complete and (address.crc32 is None or address.crc32 == checksum):
            return content
        self.drop(address)
        return None

    def put(self, address: Address, content: bytes) -> None:
        """Adds the bytes at an address, if the disk takes them."""
        path = self._path(address)
        partial = self._partial / f"{path.name}.{os.getpid()}-{threading.get_ident()}"
        try:
            if self.failure or path.exists():
                return
            for folder in (self._partial, path.parent):
                folder.mkdir(parents=True, exist_ok=True)
            try:
                partial.unlink(missing_ok=True)  # of a killed process with the same numbers
                with open(partial, "xb") as file:
                    file.write(content + _trailer(address, crc32(content)))
                partial.rename(path)
            except OSError:
                with contextlib.suppress(OSError):
                    partial.unlink()
                raise
        except OSError as error:
            self._give_up(error)

    def drop(self, address: Address) -> None:
        """Removes the bytes at an address; does nothing if the cache does not hold them."""
        with contextlib.suppress(OSError):
            self._path(address).unlink()

    def _path(self, address: Address) -> Path:
        name = f"{_hash_of(address):032x}"
        return self._directory / name[:3] / name

    def _remove_stale(self) -> None:
        for path in self._partial.iterdir():
            with contextlib.suppress(OSError):
                if _UNFINISHED.fullmatch(path.name) and time.time() - path.lstat().st_mtime > _STALE_S:
                    path.unlink()

    def _give_up(self, error: OSError) -> None:
        self.failure = (
            f"{self._directory}: the cache cannot be written ({error.strerror or error}). The run goes on and reads "
            "from the store what is not in the cache. Free some space, or lower data.remote.cache_bytes."
        )
        _log.warning("%s", self.failure)


def is_pinned(address: Address, share: float) -> bool:
    """Returns whether an address belongs to the given share of all addresses, in [0, 1].

    The choice depends on the address alone, and a smaller share is a part of a larger one.
    """
    return _hash_of(address) < share * 2**128


def shares_of_corpora(
    num_bytes: int, speech: Corpora, noise: Corpus | None, repeats: Sequence[float]
) -> Mapping[Path, float]:
    """Divides the cache among corpora: noise first, then the corpora whose cuts are seen most often.

    Args:
        num_bytes: Size of the cache.
        speech: Corpora of speech.
        noise: The noise corpus, if there is one.
        repeats: How often the cuts of each corpus of speech are seen in an epoch.

    Returns:
        The share of each corpus that the cache keeps, in [0, 1], by its path.
    """
    in_order = [corpus for _, corpus in sorted(zip(repeats, speech.corpora, strict=True), key=lambda pair: -pair[0])]
    left, shares = num_bytes, {}
    for corpus in ([noise] if noise is not None else []) + in_order:
        needed = num_bytes_of(corpus) if num_bytes and corpus.is_remote else 0
        shares[corpus.path] = min(1.0, left / needed) if needed else 0.0
        left = max(0, left - needed)
    return shares


def num_bytes_of(corpus: Corpus) -> int:
    """Returns the approximate number of bytes of all members of a corpus."""
    num_cuts = len(corpus)
    sampled = range(0, num_cuts, -(-num_cuts // _MAX_SAMPLED))
    lengths = [address.length for index in sampled if (address := corpus.address(index)) is not None]
    total = round(sum(lengths) * num_cuts / len(sampled))
    if corpus.num_shards > _MAX_SAMPLED:
        return total
    # Several cuts may be windows of one member.
    return min(total, sum(shard.info.size for shard in corpus.shards()))


def _read_own(path: Path, num_bytes: int) -> bytes:
    """Returns the content of a file if it is a regular one of this user and has this size; otherwise nothing.

    Raises:
        OSError: There is no such file, or it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | _OPEN)
    try:
        status = os.fstat(descriptor)
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not is_own or status.st_size != num_bytes:
            return b""
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            return file.readall()
    finally:
        os.close(descriptor)


def _trailer(address: Address, checksum: int) -> bytes:
    """Returns the last bytes of a file, which distinguish it from files of other addresses."""
    return _CHECKSUM.pack(checksum ^ (_hash_of(address) & 0xFFFFFFFF))


def _hash_of(address: Address) -> int:
    key = f"{address.location}\0{address.etag}\0{address.shard_size}\0{address.offset}\0{address.length}"
    return int.from_bytes(blake2b(key.encode(), digest_size=16, person=b"nestdata-cache").digest(), "big")
