"""Finds speech in recordings with Silero VAD, and joins it into cuts.

The package computes its network with onnxruntime, and decides where speech begins and ends. Memory does not depend on
the length of a recording, unless its transforms need all of its samples at once.
"""

import importlib.util
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.decode import at_rate, load_samples, samples_in
from nestdata.audio.lhotse_audio import needs_whole_cut
from nestdata.audio.resampling import resample
from nestdata.corpus.corpora import Corpora, spread_over
from nestdata.corpus.corpus import Corpus
from nestdata.errors import AudioError, ConfigError
from nestdata.prepare.prepare_config import SegmentConfig

RATE = 16000
"""Sampling rate of the detector and of its spans, in Hz."""

# Speech lasts until its probability falls below this. Silero VAD's own 0.35 often ends speech before its last syllable
# (docs/decisions/nestdata/cut-at-pauses.md).
_RELEASE = 0.1
# Shortest part of a recording that is searched at a time.
_BLOCK_SECONDS = 120.0
# Samples before damage that may be lost, because damage is located only up to this number.
_DAMAGE_MARGIN = RATE // 10
# Cuts of a corpus, and seconds of each, that are searched for `share_of_speech`: minutes of audio, a second of work.
_MAX_CUTS_HEARD = 40
_MAX_SECONDS_HEARD = 15.0
# Speech that is near the end of a part is searched again, from this many samples before it, with the next part.
_MARGIN = RATE
_MISSING = "finding speech needs silero-vad and onnxruntime. Install them with `pip install 'nest-pretrain[vad]'`."

Span = tuple[int, int]
"""Start and end of speech or of a cut in a recording, in samples at `RATE`."""


class Speech(NamedTuple):
    """The speech of a recording, up to where it can be decoded."""

    spans: list[Span]
    """Ordered and disjoint."""

    num_samples: int
    """Number of samples that were searched."""

    error: AudioError | None
    """Why the recording could not be decoded up to its end."""

    def within(self, start: int, stop: int) -> int:
        """Returns the number of samples of speech in a span."""
        first = max(0, bisect_right(self.spans, (start, 0)) - 1)
        spans = self.spans[first : bisect_right(self.spans, (stop, 0))]
        return sum(max(0, min(stop, end) - max(start, begin)) for begin, end in spans)


def detector_name() -> str:
    """Returns name and version of the detector.

    Raises:
        ConfigError: It is not installed.
    """
    if not _is_installed():
        raise ConfigError(_MISSING)
    return f"silero-vad {version('silero-vad')}"


def find_speech(row: Mapping[str, Any], content: bytes | None, max_seconds: float) -> Speech:
    """Finds speech in a cut of any length.

    Args:
        row: The cut as a dict, at the sampling rate of its file or with a transform to another one.
        content: The bytes of the audio file, as for `load_samples`.
        max_seconds: Longest span; longer speech is divided at its longest pause or, without one, anywhere.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    row = {**row, "recording": at_rate(row["recording"], RATE)}
    num_samples = samples_in(row["duration"], RATE)
    block = round(max(_BLOCK_SECONDS, 4 * max_seconds) * RATE)
    if needs_whole_cut(row["recording"]):
        block = max(1, num_samples)
    spans, unfinished, start = list[Span](), list[Span](), 0
    while start < num_samples:
        stop = min(start + block, num_samples)
        samples, error = load_up_to_damage(row, start, stop - start, content)
        found = [(start + each["start"], start + each["end"]) for each in _detector()(samples, max_seconds)]
        if error:
            # Spans that were found with the previous part are kept, even if less can be decoded now.
            end = max([start + len(samples), *(end for _, end in unfinished)])
            return Speech(spans + (found if end == start + len(samples) else unfinished), end, error)
        unfinished = [span for span in found[-1:] if stop < num_samples and span[1] > stop - _MARGIN]
        spans += found[: len(found) - len(unfinished)]
        for begin, _ in unfinished:
            stop = max(begin - _MARGIN, *(end for _, end in spans[-1:]), start + 1)
        start = stop
    return Speech(spans, num_samples, None)


def load_up_to_damage(
    row: Mapping[str, Any], start: int, num_samples: int, content: bytes | None
) -> tuple[NDArray[np.float32], AudioError | None]:
    """Returns the samples of a part of a cut; if it is damaged, the samples before the damage, and the error.

    Args:
        row: The cut as a dict.
        start: First sample of the part.
        num_samples: Number of samples of the part.
        content: The bytes of the audio file, as for `load_samples`.
    """
    try:
        return load_samples(row, start=start, num_samples=num_samples, content=content), None
    except AudioError as error:
        failure = error
    samples, failing = np.empty(0, np.float32), num_samples
    is_divisible = not needs_whole_cut(row["recording"])
    while is_divisible and failing - len(samples) > _DAMAGE_MARGIN:
        middle = (len(samples) + failing) // 2
        try:
            samples = load_samples(row, start=start, num_samples=middle, content=content)
        except AudioError as error:
            failing, failure = middle, error
    return samples, failure


def share_of_speech(corpus: Corpus | Corpora) -> float | None:
    """Returns the share of a corpus that is speech, by cuts spread over its lengths.

    Returns None without the detector, for audio in an object store, and if no cut can be read.
    """
    if not _is_installed() or corpus.is_remote:
        return None
    rate, num_speech, num_samples = corpus.sampling_rate, 0, 0
    for part, index in spread_over(corpus, _MAX_CUTS_HEARD):
        length = min(part.num_samples_of(index), round(_MAX_SECONDS_HEARD * rate))
        with suppress(AudioError):
            samples = resample(part.load(index, num_samples=length)[1], rate, RATE)
            num_speech += sum(span["end"] - span["start"] for span in _detector()(samples, _MAX_SECONDS_HEARD))
            num_samples += len(samples)
    return num_speech / num_samples if num_samples else None


def join_speech(speech: Speech, config: SegmentConfig) -> list[Span]:
    """Returns the cuts of a recording: spans of speech that are joined across pauses, with padding.

    A span is joined with the next one until it is long enough; if it stays too short, it is joined with the one before
    it. Spans are only joined if the pause between them and the length of both are within the limits.
    """
    padding, shortest = round(config.padding_seconds * RATE), round(config.min_seconds * RATE)
    longest, max_pause = round(config.max_seconds * RATE) - 2 * padding, round(config.max_pause * RATE)
    shortest -= 2 * padding

    def joined(spans: list[Span], is_short: Callable[[Span, Span], bool]) -> list[Span]:
        found = spans[:1]
        for start, end in spans[1:]:
            first, last = found[-1]
            if start - last <= max_pause and end - first <= longest and is_short((first, last), (start, end)):
                found[-1] = first, end
            else:
                found.append((start, end))
        return found

    spans = joined(speech.spans, lambda before, _: before[1] - before[0] < shortest)
    spans = joined(spans, lambda _, after: after[1] - after[0] < shortest)
    if not spans:
        return spans
    # Two cuts that are near each other meet in the middle of the pause.
    middles = [(before[1] + after[0]) // 2 for before, after in pairwise(spans)]
    lows, highs = [0, *middles], [*middles, speech.num_samples]
    return [
        (max(low, start - padding), min(high, end + padding))
        for (start, end), low, high in zip(spans, lows, highs, strict=True)
    ]


def _is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("silero_vad", "onnxruntime"))


@cache
def _detector() -> Callable[[Any, float], list[dict[str, int]]]:
    """Returns a function of samples and of the longest span in seconds, which returns spans in samples."""
    import torch

    num_threads = torch.get_num_threads()
    from silero_vad import get_speech_timestamps_sequence, load_silero_vad

    torch.set_num_threads(num_threads)  # the import sets it for the whole process
    model = load_silero_vad(sequence=True)

    def detect(samples: Any, max_seconds: float) -> list[dict[str, int]]:
        found: list[dict[str, int]] = get_speech_timestamps_sequence(
            samples, model, neg_threshold=_RELEASE, speech_pad_ms=0, max_speech_duration_s=max_seconds
        )
        return found

    return detect
