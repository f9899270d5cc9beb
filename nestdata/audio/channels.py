"""Channels of audio, and how a cut says that it is the average of all channels."""

from collections.abc import Mapping
from typing import Any, Literal

Channel = int | Literal["mix"]
"""A channel, counted from 0, or "mix" for the average of all channels of a file."""

NAMED_CHANNELS = {"left": 0, "right": 1}
"""Names that stereo audio has for its channels."""

MIX_FIELD = "nest_channel"
"""Custom field of cuts that are the average of all channels of their file; its value is "mix".

The cut itself names the first channel, because a Lhotse `MonoCut` has exactly one. With Lhotse's `MultiCut`, every
reader of a corpus would meet two kinds of cuts, and with `--probe missing` the number of channels is not known. In the
fingerprint of a corpus, the channel of such a cut is -1.
"""


def is_mixed(cut: Mapping[str, Any]) -> bool:
    """Returns whether a cut, as a dict, is the average of all channels of its file."""
    return (cut.get("custom") or {}).get(MIX_FIELD) == "mix"
