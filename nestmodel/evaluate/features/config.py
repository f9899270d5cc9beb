"""Settings of extracted features. The module imports no heavy package, so that help of commands starts fast."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nestdata.field_docs import with_field_docs
from nestmodel.errors import ConfigError
from nestmodel.options import FeatureType, FileFormat

Layers = Literal["all", "last"] | Sequence[int]
"""Outputs of an encoder by number: 0 is the input of the first block, i the output of the i-th block."""


@with_field_docs
@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractConfig:
    """Which encoder outputs are written, and how they are stored."""

    layers: Layers = "last"
    """Layers to keep: all, last, or numbers such as 0,4,16, where 0 is the input of the first block."""

    format: FileFormat = "npy"
    """Format of the feature files."""

    dtype: FeatureType = "float32"
    """Precision of the feature files.

    The encoder computes in float32."""

    max_batch_seconds: float = 120.0
    """Maximum audio per batch in seconds, padding included.

    A longer utterance is a batch by itself."""

    device: str = "auto"
    """Device such as cpu or cuda:1; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        check_batch_seconds(self.max_batch_seconds)


def parse_layers(text: str) -> Layers:
    """Parses `all`, `last`, or layer numbers separated by commas.

    Raises:
        ConfigError: The text is none of these.
    """
    if text == "all":
        return "all"
    if text == "last":
        return "last"
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(f"layers is {text!r}: give all, last, or numbers such as 0,4,16.") from None


def check_batch_seconds(max_batch_seconds: float) -> None:
    """Raises ConfigError unless the limit is positive."""
    if not max_batch_seconds > 0:
        raise ConfigError(f"max_batch_seconds is {max_batch_seconds:g}: give a positive number of seconds.")
