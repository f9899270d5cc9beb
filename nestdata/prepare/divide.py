"""Divides an entry into cuts of admitted length: one, windows of one length, or the speech between its pauses."""

import math
from functools import cache
from typing import Any

from nestdata.audio.decode import samples_in
from nestdata.errors import AudioError
from nestdata.prepare.found import Reject, Searched
from nestdata.prepare.inputs.entry import RejectReason
from nestdata.prepare.prepare_config import PrepareConfig
from nestdata.prepare.read import WholeEntry
from nestdata.prepare.speech import RATE, Speech, find_speech, join_speech

# A few limits are compared with every cut.
_limit_in = cache(samples_in)
# Speech that is not cut at pauses is still found in spans of a limited length, so that memory is limited.
_MAX_SPAN_SECONDS = 30.0

Part = dict[str, Any] | Reject | Searched
"""A cut of an entry as a dict, which has not been judged yet; or a part that is rejected; or how much was searched."""


def divide(whole: WholeEntry, config: PrepareConfig) -> list[Part]:
    """Returns the parts of an entry in order, and how much speech it has if that was looked for.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    rows = _windows(whole.row, config.window_seconds, config.sampling_rate)
    problem = _length_problem(rows[0], config)  # windows are equally long
    if problem and (config.segment is None or problem[0] != "too_long"):  # a recording that is too long is cut
        return [Reject(whole.entry.where, whole.entry.cut_id, *problem)]
    if not config.finds_speech:
        return [*rows]
    max_seconds = _MAX_SPAN_SECONDS
    if config.segment:
        max_seconds = config.segment.max_seconds - 2 * config.segment.padding_seconds
    speech = find_speech(whole.row, whole.audio.read(), max_seconds)
    parts = _segments(whole, config, speech) if config.segment else _with_speech(whole, rows, config, speech)
    total = sum(end - start for start, end in speech.spans)
    return [*parts, Searched(speech.num_samples / RATE, total / RATE)]


def _windows(row: dict[str, Any], max_seconds: float | None, rate: int) -> list[dict[str, Any]]:
    """Returns a cut, or its windows: as few as the limit allows, all of the same length in whole samples.

    Args:
        row: The cut.
        max_seconds: Longest duration of a window; None to keep the cut whole.
        rate: Rate of the corpus in Hz.
    """
    if max_seconds is None:
        return [row]
    num_samples, max_samples = samples_in(row["duration"], rate), math.floor(round(max_seconds * rate, 8))
    if num_samples <= max_samples:
        return [row]
    num_windows = -(-num_samples // max_samples)
    step = num_samples // num_windows
    return [_window_of(row, row["start"] + i * step / rate, step / rate) for i in range(num_windows)]


def _window_of(row: dict[str, Any], start: float, duration: float) -> dict[str, Any]:
    """Returns one window of a cut, with its labels but without text, alignment and features of the whole cut."""
    cut_id = f"{row['id']}@{start:.3f}+{duration:.3f}"
    span = {"id": cut_id, "start": 0.0, "duration": duration}
    labels = [{**item, **span} for item in row["supervisions"][:1]]
    for label in labels:
        label.pop("text", None)
        label.pop("alignment", None)
    window = {**row, "id": cut_id, "start": start, "duration": duration, "supervisions": labels}
    window.pop("features", None)
    return window


def _length_problem(row: dict[str, Any], config: PrepareConfig) -> tuple[RejectReason, str] | None:
    """Compares a duration with its limits in samples, because one in seconds after an offset is inexact."""
    rate, seconds = config.sampling_rate, row["duration"]
    num_samples = samples_in(seconds, rate)
    if num_samples < _limit_in(config.min_seconds, rate):
        return "too_short", f"{seconds:.6g} s, the minimum is {config.min_seconds:g} s"
    if config.max_seconds is not None and num_samples > _limit_in(config.max_seconds, rate):
        return "too_long", f"{seconds:.6g} s, the maximum is {config.max_seconds:g} s"
    if num_samples < 1:
        return "empty", "the span is shorter than one sample"
    return None


def _segments(whole: WholeEntry, config: PrepareConfig, speech: Speech) -> list[Part]:
    """Returns the cuts of a recording between its pauses."""
    assert config.segment is not None
    row, parts = whole.row, list[Part]()
    if not speech.spans and not speech.error:
        parts.append(whole.reject(row, "no_speech", f"no speech in {row['duration']:.6g} s"))
    for start, stop in join_speech(speech, config.segment):
        part = _span_of(row, start, stop)
        problem = _length_problem(part, config) or _speech_problem(speech, start, stop, config)
        parts.append(whole.reject(part, *problem) if problem else part)
    if speech.error:
        rest = _span_of(row, speech.num_samples, math.ceil(row["duration"] * RATE))
        parts.append(_reject_damaged(whole, rest, speech.num_samples, speech.error))
    return parts


def _with_speech(whole: WholeEntry, rows: list[dict[str, Any]], config: PrepareConfig, speech: Speech) -> list[Part]:
    """Returns the cut of an entry, or its windows, if they have enough speech."""
    parts = list[Part]()
    for window in rows:
        start = samples_in(window["start"] - whole.row["start"], RATE)
        stop = start + max(1, samples_in(window["duration"], RATE))
        if speech.error and stop > speech.num_samples:
            parts.append(_reject_damaged(whole, window, speech.num_samples, speech.error))
        elif problem := _speech_problem(speech, start, stop, config):
            parts.append(whole.reject(window, *problem))
        else:
            parts.append(window)
    return parts


def _reject_damaged(whole: WholeEntry, part: dict[str, Any], num_decoded: int, error: AudioError) -> Reject:
    """Returns the reject of a part of an entry that was decoded up to `num_decoded` samples at `RATE`."""
    position = whole.row["start"] + num_decoded / RATE
    return whole.reject(part, error.reason, f"decoded up to {position:.1f} s: {error}")


def _speech_problem(speech: Speech, start: int, stop: int, config: PrepareConfig) -> tuple[RejectReason, str] | None:
    found = speech.within(start, stop)
    if not found:
        return "no_speech", "no speech in the whole cut"
    share = found / (stop - start)
    if config.min_speech_share is not None and share < config.min_speech_share:
        return "little_speech", f"the share of speech is {share:.3g}, the minimum is {config.min_speech_share:g}"
    return None


def _span_of(row: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Returns a span of a cut in samples at `RATE`; the cut itself if the span is all of it."""
    offset, end = start / RATE, min(stop / RATE, row["duration"])
    duration = round(end - offset, 9)
    return row if not start and end == row["duration"] else _window_of(row, row["start"] + offset, duration)
