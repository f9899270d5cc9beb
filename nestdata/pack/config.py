"""Settings of `pack_corpora`. The module imports no heavy package, so that `nestdata pack --help` starts fast."""

from dataclasses import dataclass
from typing import Literal

from nestdata.config_checks import require, require_at_least
from nestdata.field_docs import with_field_docs

PackCodec = Literal["flac", "pcm"]
"""Format of packed audio files: FLAC, or WAV with integer samples."""


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class PackConfig:
    """Form, order and portions in which a corpus is packed."""

    codec: PackCodec = "flac"
    """`flac` compresses without loss; `pcm` is WAV, larger and cheaper to decode."""

    bits: int = 16
    """Bits per sample, 16 or 24, of audio that does not fit into 16 bits, such as resampled.

    Audio of 16 bits keeps its samples, and its 16 bits."""

    shard_bytes: int = 1_000_000_000
    """Approximate size of each tar file in bytes."""

    seed: int = 0
    """Seed of the order of the cuts."""

    def __post_init__(self) -> None:
        require(self.codec in ("flac", "pcm"), "codec", self.codec, "flac or pcm")
        require(self.bits in (16, 24), "bits", self.bits, "16 or 24")
        require_at_least(1, "", self, "shard_bytes")
