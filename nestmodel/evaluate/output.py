"""Where results go: a directory or file written beside its target, and moved into place when it is whole."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nestdata import move_into_place, partial_directory
from nestmodel.errors import ConfigError


@contextmanager
def output_directory(output: Path, *, overwrite: bool, marker: str, kind: str) -> Iterator[Path]:
    """Yields an empty directory beside the target, which gets the target's name at the end; on an error it is removed.

    Args:
        output: The target.
        overwrite: Whether a result of the same kind that lies there is replaced.
        marker: JSON file that is written into every such directory, and says under `kind` what it is.
        kind: What results of this kind say there.

    Raises:
        ConfigError: Something is in the way that may not be replaced.
        CorpusError: It cannot be written, or another run is writing it.
    """
    _check(output, overwrite, output / marker, kind)
    with partial_directory(output) as partial:
        yield partial
        _check(output, overwrite, output / marker, kind)  # once more: another run may have finished meanwhile
        move_into_place(partial, output)


@contextmanager
def output_file(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields a path to write to, in a directory beside the target; at the end the file gets the target's name.

    Other files in that directory come along under their own names, such as the weights of an ONNX file of over 2 GB.

    Args:
        output: The target.
        overwrite: Whether a file that lies there is replaced.

    Raises:
        ConfigError: Something is in the way that may not be replaced.
        CorpusError: It cannot be written, or another run is writing it.
    """
    _check_file(output, overwrite)
    with partial_directory(output) as partial:
        yield partial / output.name
        _check_file(output, overwrite)  # once more: another run may have finished meanwhile
        # The file itself comes last, and whoever finds it finds the others.
        for path in sorted(partial.iterdir(), key=lambda path: path.name == output.name):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.replace(output.with_name(path.name))
        shutil.rmtree(partial)


def _check_file(output: Path, overwrite: bool) -> None:
    if output.is_dir():
        raise ConfigError(f"{output}: is a directory. Choose another place.")
    if output.exists() and not overwrite:
        raise ConfigError(f"{output}: exists already. Choose another place, or pass --overwrite to replace it.")


def _check(output: Path, overwrite: bool, marker: Path, kind: str) -> None:
    if not output.exists():
        return
    if not overwrite:
        raise ConfigError(f"{output}: exists already. Choose another place, or pass --overwrite to replace it.")
    try:
        found = json.loads(marker.read_text()).get("kind")
    except (OSError, ValueError, AttributeError):
        found = None
    if found != kind:
        raise ConfigError(f"{output}: exists already, and holds something else than {kind}. Choose another place.")
