"""Code that torch's compiler has generated, in the output folder of a run, so that the next start loads it.

It is one file for each GPU of a node, because compiled code names its GPU by number. Torch unpacks it into its own
cache (TORCHINDUCTOR_CACHE_DIR, by default on the local disk), and takes what fits the versions, the kind of GPU, the
graph and its settings. Unpacked code is executed, so only a file that no other user can have written is read.
"""

import hashlib
import os
import stat
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_warn

from nestdata import last_error_line
from nestdata.output import replaced_file, write_all
from nestmodel.nn.network import NestNetwork
from nestmodel.training.step_limits import ends_step

_DIGEST_BYTES = hashlib.sha256().digest_size


class CompiledCode(pl.Callback):
    """Loads compiled code before the first step, and writes it after 1, 2, 4, 8, ... steps if there is new code.

    The first node writes. Nothing is read or written if a run compiles nothing. If a file is missing or damaged, or the
    disk is full, the code is compiled again, which takes time.

    Args:
        folder: Folder of the files, which is created when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_steps = 0
        self._written = b""  # digest of the file

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Loads the code of an earlier start."""
        self._num_steps = 0
        if not _compiles(trainer, pl_module):
            return
        path = self._path(trainer)
        try:
            content = read_trusted(path)
            if content is not None:
                torch.compiler.load_cache_artifacts(content)
        except Exception as error:  # torch may raise any error if it cannot unpack or write the code
            rank_zero_warn(f"{path} is not used, and the code is compiled again: {last_error_line(error)}")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _outputs: Any, _batch: Any, batch_idx: int
    ) -> None:
        """Writes the code that this start has compiled or loaded."""
        if not ends_step(trainer, batch_idx) or not _compiles(trainer, pl_module) or trainer.node_rank:
            return
        self._num_steps += 1
        if self._num_steps.bit_count() != 1:
            return
        try:
            found = torch.compiler.save_cache_artifacts()
            if found is None or (digest := hashlib.sha256(found[0]).digest()) == self._written:
                return
            write_trusted(self._path(trainer), found[0])
            self._written = digest
        except Exception as error:  # a full disk, or any error of torch if it cannot pack the code
            path, reason = self._path(trainer), last_error_line(error)
            rank_zero_warn(f"{path} cannot be written, and the next start compiles again: {reason}")

    def _path(self, trainer: pl.Trainer) -> Path:
        return self._folder / f"{trainer.strategy.root_device.index or 0}.bin"


def _compiles(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    return isinstance(module, NestNetwork) and module.backend.compiled and not cast(Any, trainer).fast_dev_run


def read_trusted(path: Path) -> bytes | None:
    """Returns the content that `write_trusted` has written; None if there is no file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged, or another user can have written it.
    """
    try:
        with path.open("rb") as file:
            status, content = os.fstat(file.fileno()), file.read()
    except FileNotFoundError:
        return None
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError("other users can have written it")
    digest, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("it is damaged")
    return content


def write_trusted(path: Path, content: bytes) -> None:
    """Writes a file with its digest atomically; only this user may read or write it.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as file:
        os.fchmod(file.fileno(), stat.S_IRUSR | stat.S_IWUSR)
        write_all(file, hashlib.sha256(content).digest() + content)
