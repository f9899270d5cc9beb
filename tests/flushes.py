"""The order in which a program flushes files and directories to the disk and renames them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Flushes:
    """Records every `fsync` and rename, which still happen, as names; a path is known by its inode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._events: list[tuple[str, int]] = []
        fsync = os.fsync
        monkeypatch.setattr(os, "fsync", lambda file: (self._add("flush", os.fstat(file).st_ino), fsync(file))[1])
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._recorded(getattr(os, name)))

    def _recorded(self, rename: Callable[..., None]) -> Callable[..., None]:
        def run(source: Any, target: Any) -> None:
            self._add("rename", os.lstat(source).st_ino)
            rename(source, target)

        return run

    def _add(self, kind: str, inode: int) -> None:
        self._events.append((kind, inode))

    def of(self, *paths: Path) -> list[str]:
        """Returns what happened to paths that exist now, in order, such as `flush a.ckpt`; symbolic links count too."""
        names = {os.lstat(path).st_ino: path.name for path in paths}
        return [f"{kind} {names[inode]}" for kind, inode in self._events if inode in names]
