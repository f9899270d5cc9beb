"""Names of audio files in manifests: the folders that relative names start from, `~`, and ids of cuts.

Source: NVIDIA NeMo 3.0, `get_full_path`: a relative name is looked up in the folder of the manifest, then in the
current directory and with `~` expanded. Differs: NeMo skips the first place for names of 255 characters and more.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from nestdata.prepare.inputs.audio import File
from nestdata.prepare.inputs.entry import Entry, cut_id_of, relative_id, resolve
from nestdata.storage import has_scheme, is_url

# Number of names, and of relative ones among them, that are looked up to find the folder that ids are relative to.
_MAX_NAMES, _MAX_LOOKUPS = 10_000, 100

_SLICE = re.compile(r"(.+):(\d{1,15}):(\d{1,15})")


@dataclass(frozen=True, slots=True)
class FileNames:
    """Finds the files that a manifest names.

    All folders are those of the process that opened the input, because workers may run in other ones.
    """

    folders: tuple[str, ...]
    """Absolute paths of the folders that relative names may start from, in order of preference; or one URL."""

    base: str
    """The folder of names that exist nowhere, and of the input as far as ids are concerned."""

    home: str = ""
    """The folder that `~` stands for; empty if it stands for itself, as at URLs."""

    hint: str = ""
    """What to add to the message for a file that does not exist."""

    @classmethod
    def of(cls, names: Iterable[str], folders: Sequence[str], default: str) -> "FileNames":
        """Returns the names of a local manifest.

        Args:
            names: Its names, of which only the first are read.
            folders: The folders that they may start from, in order of preference; the first in which one of the names
                exists becomes `base`.
            default: `base` if no name exists.
        """
        relative = (name for name in islice(names, _MAX_NAMES) if name and not _is_absolute(name) and name[0] != "~")
        lookups = ((folder, name) for name in islice(relative, _MAX_LOOKUPS) for folder in folders)
        base = next((folder for folder, name in lookups if os.path.exists(os.path.join(folder, name))), default)
        return cls(tuple(dict.fromkeys(folders)), base, os.path.expanduser("~"))

    @classmethod
    def beside(cls, folder: str, names: Callable[[], Iterable[str]]) -> "FileNames":
        """Returns the names of a manifest in a folder; local ones may start from the current directory instead.

        Args:
            folder: Absolute path or URL.
            names: Returns the names in the manifest, which is only asked for those of a local one.
        """
        return cls((folder,), folder) if is_url(folder) else cls.of(names(), (folder, os.getcwd()), folder)

    def file(self, name: str) -> File:
        """Returns the file with a name: an absolute or relative path, or a URL of any scheme."""
        is_home = name[:1] == "~" and self.home
        if _is_absolute(name) or (len(self.folders) == 1 and not is_home):
            return File(resolve(self.base, name), hint=self.hint)
        for folder in self.folders:
            path = resolve(folder, name)
            if os.path.isfile(path):
                return File(path)
        path = self._from_home(name) if is_home else resolve(self.base, name)
        if is_home and os.path.isfile(path):
            return File(path)
        others = "".join(f", nor below {folder}" for folder in self.folders if is_home or folder != self.base)
        return File(path, hint=others + self.hint)

    def _from_home(self, name: str) -> str:
        """Returns the path that a name with `~` stands for."""
        return resolve(self.home, "." + name[1:]) if name[1:2] in ("", "/") else os.path.expanduser(name)


def entry_of_slice(
    where: str,
    name: str,
    names: FileNames,
    root: str,
    *,
    labels: dict[str, Any] | None = None,
    number: int | None = None,
) -> Entry | None:
    """Returns the entry of a name FILE:OFFSET:FRAMES of fairseq, which counts samples at the rate of the file.

    Returns None for other names, and if there is a file of that name.

    Args:
        where: Position in the input.
        name: The name in the manifest: a path or a URL.
        names: Finds the file.
        root: The folder that ids are relative to.
        labels: See `Entry`.
        number: See `Entry`.
    """
    match = _SLICE.fullmatch(name) if name[-1:].isdigit() else None
    if match is None or os.path.isfile(names.file(name).location):
        return None
    file, start, num_frames = names.file(match[1]), int(match[2]), int(match[3])
    cut_id = f"{cut_id_of(file.location, root)}:{start}:{num_frames}"
    return Entry(where, cut_id, file, labels=labels, number=number, first_frame=start, num_frames=num_frames)


def id_of_name(path: str, name: str, root: str) -> str:
    """Returns the id of the cut of a file in a manifest; see `cut_id_of`.

    Args:
        path: The absolute path or URL of the file.
        name: The name in the manifest. If it is relative, the id does not depend on the location of the manifest.
        root: The folder that ids are relative to.
    """
    cut_id = cut_id_of(path, root)
    is_outside = cut_id.startswith("/") or "://" in cut_id
    return relative_id(cut_id, root) if is_outside and not (name.startswith(("/", "~")) or is_url(name)) else cut_id


def _is_absolute(name: str) -> bool:
    return name[:1] == "/" or ("://" in name and has_scheme(name))
