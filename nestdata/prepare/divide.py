"""Divides an entry into cuts of admitted length: one, windows of one length, or what is between the pauses of speech.

If the configuration asks for speech, all audio is decoded, and each cut is measured.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from nestdata.audio.decode import samples_in
from nestdata.errors import AudioError
from nestdata.prepare.config import PrepareConfig
from nestdata.prepare.inputs.audio import RejectReason
from nestdata.prepare.read import WholeEntry
from nestdata.prepare.speech.config import FRAME_SECONDS, SegmentConfig
from nestdata.prepare.speech.cutting import FrameRules, Spans, plan_cuts, speech_runs
from nestdata.prepare.speech.frames import SpeechFrames, speech_frames
from nestdata.prepare.speech.measures import FramePowers, SpeechMeasures, SpeechTotals
from nestdata.prepare.writing.found import Reject, rejected_entry

# A few limits are compared with every cut.
_limit_in = cache(samples_in)


class Part(NamedTuple):
    """A cut of an entry that has not been judged yet."""

    row: dict[str, Any]
    """The cut as a dict."""

    measures: SpeechMeasures | None = None
    """Its speech, if it was looked for."""


Divided = Part | Reject | SpeechTotals


def divide(whole: WholeEntry, config: PrepareConfig) -> list[Divided]:
    """Returns the parts of an entry and the rejected ones in order, and how much speech it has if that was looked for.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    rows = _windows(whole.row, config.window_seconds, config.sampling_rate)
    problem = _length_problem(rows[0], config)  # windows are equally long
    if problem and (config.segment is None or problem[0] != "too_long"):  # a recording that is too long is cut
        return [rejected_entry(whole.entry, *problem, config.channel)]
    if not config.finds_speech:
        return [Part(row) for row in rows]
    try:
        frames = speech_frames(whole.row, whole.audio.read())
    except AudioError as error:
        return [whole.reject(whole.row, error.reason, str(error))]
    runs = speech_runs(frames.probabilities)
    if config.segment is None:
        return [*_measured(whole, rows, frames, runs)]
    return [*_segments(whole, config, frames, runs, config.segment)]


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


def _segments(
    whole: WholeEntry, config: PrepareConfig, frames: SpeechFrames, runs: Spans, segment: SegmentConfig
) -> Iterator[Divided]:
    """Yields the cuts of a recording between its pauses."""
    row, num_frames = whole.row, len(frames.powers)
    plan = plan_cuts(runs, frames.probabilities, FrameRules.of(segment))
    if num_frames:
        yield _totals(frames, runs, plan.spans, num_in_speech=plan.num_in_speech)
    if num_frames and not len(runs):
        part = _span_of(row, 0, num_frames)
        yield whole.reject(part, "no_speech", f"no speech in {part['duration']:.6g} s")
    powers = FramePowers(frames.powers, runs)
    for start, stop in plan.spans.tolist():
        part = _span_of(row, start, stop)
        if problem := _length_problem(part, config):
            yield whole.reject(part, *problem)
        else:
            yield Part(part, powers.measure(start, stop))
    if frames.error:
        rest = _span_of(row, num_frames, math.ceil(row["duration"] / FRAME_SECONDS))
        yield whole.reject(rest, frames.error.reason, str(frames.error))


def _measured(whole: WholeEntry, rows: list[dict[str, Any]], frames: SpeechFrames, runs: Spans) -> Iterator[Divided]:
    """Yields the cut of an entry, or its windows, with their measures."""
    powers = FramePowers(frames.powers, runs)
    for window in rows:
        offset = window["start"] - whole.row["start"]
        start = math.floor(round(offset / FRAME_SECONDS, 6))
        stop = math.ceil(round((offset + window["duration"]) / FRAME_SECONDS, 6))
        if frames.error and stop > len(frames.powers):
            yield whole.reject(window, frames.error.reason, str(frames.error))
        else:
            yield Part(window, powers.measure(start, stop))
    if len(frames.powers):
        yield _totals(frames, runs, [[0, len(frames.powers)]])


def _totals(frames: SpeechFrames, runs: Spans, spans: Any, num_in_speech: int = 0) -> SpeechTotals:
    return SpeechTotals(
        num_recordings=1,
        num_without_speech=int(not len(runs)),
        frames=len(frames.powers),
        speech_frames=_length(runs),
        cut_frames=_length(spans),
        num_in_speech=num_in_speech,
    )


def _length(spans: Any) -> int:
    return sum(int(stop - start) for start, stop in spans)


def _span_of(row: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Returns a span of a cut in frames; the cut itself if the span is all of it."""
    offset, duration = _seconds(row, start, stop)
    return row if duration == row["duration"] else _window_of(row, row["start"] + offset, duration)


def _seconds(row: dict[str, Any], start: int, stop: int) -> tuple[float, float]:
    """Returns offset and duration of a span in frames. The last frame may end after the cut."""
    offset, end = round(start * FRAME_SECONDS, 6), min(round(stop * FRAME_SECONDS, 6), row["duration"])
    return offset, round(end - offset, 9) if offset else end
