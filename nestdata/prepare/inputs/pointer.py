"""Pointers of Lhotse 2 to members of tars, `TAR?o=START&e=END`, as `cuts.jsonl` has them as well."""

import re

from nestdata.errors import ManifestError, StorageError
from nestdata.prepare.inputs.audio import Member, Unusable
from nestdata.prepare.inputs.content import StoredContent
from nestdata.prepare.inputs.listing import object_info
from nestdata.prepare.inputs.names import FileNames
from nestdata.prepare.inputs.shard import damage, unsafe
from nestdata.prepare.inputs.tar import TarError, walk_archive
from nestdata.storage import is_url, storage

# END is the header of the next sample, and says nothing that the header at START does not.
_POINTER = re.compile(r"(?P<tar>[^?]+)\?o=(?P<start>\d{1,18})&e=\d{1,18}")


def member_at(pointer: str, names: FileNames, where: str) -> Member | Unusable:
    """Returns the member that a pointer names, whose length is read from its header in the tar.

    Args:
        pointer: The source of a Lhotse `AudioSource` of type `shar_ptr`.
        names: Finds the tar.
        where: Position in the manifest, for messages.

    Raises:
        ManifestError: It is not a pointer.
        StorageError: The store of the tar refuses or does not answer.
    """
    parts = _POINTER.fullmatch(pointer)
    if parts is None:
        raise ManifestError(f"{where}: a source of type 'shar_ptr' at {pointer!r}. Give TAR?o=START&e=END.")
    location = parts["tar"] if is_url(parts["tar"]) else names.file(parts["tar"]).location
    start = int(parts["start"])
    try:
        info = object_info(location) if is_url(location) else storage().info(location)

        def read_at(offset: int, length: int) -> bytes:
            length = max(0, min(length, info.size - start - offset))
            return storage().read_range(location, start + offset, length, etag=info.etag, size=info.size)

        found = next(walk_archive(read_at, info.size - start), None)
    except StorageError as error:
        if error.kind not in ("missing", "changed"):
            raise
        return Unusable(error.kind, str(error))
    except TarError as error:
        return damage(error, location)
    if found is None:
        return Unusable("no_such_member", f"{pointer}: the tar ends there")
    if found.problem:
        return unsafe(found, location)
    offset = start + found.offset
    return Member(info, offset, found.size, StoredContent(location, offset, found.size, info.etag, info.size))
