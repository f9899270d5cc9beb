"""Closed choices and settings that commands read without importing torch or numpy."""

from dataclasses import dataclass
from typing import Literal

from nestdata.config_checks import require
from nestdata.field_docs import with_field_docs

ShortAudio = Literal["repeat", "pad"]
"""How a cut that is too short is lengthened: its audio again, or silence."""

StartMethod = Literal["fork", "forkserver", "spawn"]
"""How loader processes are started; see Python's `multiprocessing`."""

PackCodec = Literal["flac", "wav"]
"""Format of packed audio files, both with 16 bits per sample."""


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class PackConfig:
    """Form and portions in which a corpus is packed."""

    codec: PackCodec = "flac"
    """`flac` compresses without loss; `wav` is larger and cheaper to decode."""

    shard_hours: float = 10.0
    """Approximate length of the audio of each tar file in hours: 10 are about 0.7 GB of FLAC at 16 kHz."""

    def __post_init__(self) -> None:
        require(self.codec in ("flac", "wav"), "codec", self.codec, "flac or wav")
        require(self.shard_hours > 0, "shard_hours", self.shard_hours, "a positive number of hours")
