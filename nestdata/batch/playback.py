"""A batch in a notebook: a table of its cuts, with the sounds of the first ones."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nestdata.batch.preview import preview_rows
from nestdata.notebook import html_sound, html_table

if TYPE_CHECKING:
    from nestdata.batch.batch import AudioNoiseBatch  # which imports this module to show itself

_MAX_ROWS = 20
_MAX_SECONDS = 4.0
# Of all sounds together, as WAV. A notebook that is saved holds them as text, of 4/3 of this size.
_MAX_SOUND_BYTES = 160_000


def batch_html(batch: "AudioNoiseBatch") -> str:
    """Returns a batch as HTML, with clean and noisy sounds of a cut with noise and of one with speech.

    If there is no such cut, the first cut is played. Of each cut, both sounds are the same span, which contains the
    start of the interference. If they exceed full scale, both are scaled down by the same factor. A batch without a
    sampling rate has no sounds. A batch on a GPU is waited for.
    """
    rate = batch.sampling_rate
    rows = preview_rows(batch, rate or 1)[:_MAX_ROWS]
    played = _played([row.mode for row in rows]) if rate else []
    lines: list[Sequence[str]] = []
    for i, row in enumerate(rows):
        length = f"{row.seconds:.2f} s" if rate else f"{row.seconds:.0f} samples"
        mode = row.mode if row.snr_db is None else f"{row.mode} at {row.snr_db:.1f} dB: {row.noise}"
        sounds = _sounds(batch, i, rate, _MAX_SOUND_BYTES // (2 * len(played))) if rate and i in played else ("",) * 3
        lines.append((row.cut, length, mode, *sounds))
    if (num_hidden := len(batch.sample_id) - len(rows)) > 0:
        lines.append((f"and {num_hidden} more", *[""] * 5))
    return html_table(repr(batch), lines, header=("cut", "length", "interference", "clean", "noisy", "span"))


def _played(modes: Sequence[str]) -> list[int]:
    """Returns the positions of the cuts that are played."""
    return [modes.index(mode) for mode in ("noise", "speech") if mode in modes] or [0][: len(modes)]


def _sounds(batch: "AudioNoiseBatch", i: int, rate: int, max_bytes: int) -> tuple[str, str, str]:
    """Returns the players of the clean and the noisy sound of a cut, and a text that describes the span."""
    length = int(batch.audio_len[i])
    number = min(length, int(_MAX_SECONDS * rate), max_bytes // 2)
    mixed_from = batch.mixes[i].segments[0][0] if batch.mixes[i].segments else 0
    start = max(0, min(mixed_from - number // 4, length - number))
    clean, noisy = (tensor[i, start : start + number].cpu().numpy() for tensor in (batch.audio, batch.noisy_audio))
    peak = max(float(np.abs(sound).max(initial=0.0)) for sound in (clean, noisy))
    level = 1.0 / peak if 1.0 < peak < np.inf else 1.0
    span = f"{start / rate:.2f} to {(start + number) / rate:.2f} s"
    return (
        html_sound(clean * np.float32(level), rate, f"clean, {batch.sample_id[i]}"),
        html_sound(noisy * np.float32(level), rate, f"noisy, {batch.sample_id[i]}"),
        span if level == 1.0 else f"{span}, at {level:.2g} of its level",
    )
