"""Bytes of audio that is neither a local file nor at an address: of commands and URLs in lines of cuts.

This is the only module that runs a command of a manifest or corpus, and it does so only if the caller allows it.
"""

import subprocess
from collections.abc import Mapping
from typing import Any

from nestdata.errors import AudioError, ConfigError, StorageError
from nestdata.storage import is_url, storage


def content_of(source: Mapping[str, Any], cut_id: str, *, allow_commands: bool) -> bytes:
    """Returns the bytes of the audio file that a Lhotse source stands for.

    Args:
        source: The source as a dict, of any type but "file".
        cut_id: Names the cut in messages.
        allow_commands: Whether to run a command.

    Raises:
        ConfigError: It is a command, and commands are not allowed.
        AudioError: There is no such object, or it has changed.
        StorageError: The store cannot be read for another reason, which says nothing about the cut.
        ValueError: The type or the URL is not supported.
        OSError, subprocess.CalledProcessError: The command fails.
    """
    kind, location = source["type"], source["source"]
    if kind == "command":
        if not allow_commands:
            raise ConfigError(
                f"cut {cut_id!r}: its audio is the output of a command: {str(location)[:120]!r}. Commands of a corpus "
                "are not run by default. If you trust it, open it with allow_commands (--allow-commands, or "
                "data.allow_commands in a configuration); or prepare it with --pcm, which runs them only once."
            )
        return output_of(location)
    if kind != "url" or not is_url(str(location)):
        raise ValueError(f"an audio source of type {kind!r} is not supported here")
    try:
        return storage().read(location)
    except StorageError as error:
        if error.kind not in ("missing", "changed"):
            raise
        raise AudioError.because(error.kind, f"cut {cut_id!r}: {error}") from error


def output_of(command: str) -> bytes:
    """Runs a command of a manifest, which the user has allowed, with a shell, and returns its output.

    Raises:
        OSError, subprocess.CalledProcessError: It fails.
    """
    return subprocess.run(command, shell=True, stdout=subprocess.PIPE, check=True).stdout
