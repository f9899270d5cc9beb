"""Cuts of recordings by their speech: cut at pauses, measured, and rejected if there is too little or too noisy speech.

All audio is decoded. Whole utterances and windows of one length are measured, and not cut.
"""

import math
import subprocess
from collections.abc import Iterator
from typing import Any

from nestdata.audio.sources import content_of
from nestdata.errors import AudioError
from nestdata.prepare.config import PrepareConfig
from nestdata.prepare.cut_rows import window_of, windows
from nestdata.prepare.inputs.audio import RejectReason
from nestdata.prepare.inputs.entry import Entry
from nestdata.prepare.probe import Cut, Reject, WholeEntry, check_length, finish, read_entry
from nestdata.prepare.speech.config import FRAME_SECONDS, SegmentConfig
from nestdata.prepare.speech.cutting import FrameRules, Spans, plan_cuts, speech_runs
from nestdata.prepare.speech.frames import SpeechFrames, speech_frames
from nestdata.prepare.speech.measures import FramePowers, SpeechMeasures, SpeechTotals

Found = Cut | Reject | SpeechTotals


def probe_speech(entry: Entry, config: PrepareConfig) -> list[Found]:
    """Returns the cuts and rejects of an entry as `probe` does, and how much speech it has.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    whole = read_entry(entry, config)
    if isinstance(whole, Reject):
        return [whole]
    row, segment = whole.row, config.segment
    is_bad = check_length(entry, windows(row, config.window_seconds, config.sampling_rate)[0], config)
    if is_bad and (segment is None or is_bad.reason != "too_long"):  # a recording that is too long is cut
        return [is_bad]
    try:
        frames = speech_frames(row, _content(whole, config))
    except AudioError as error:
        return [whole.reject(row, error.reason, str(error))]
    runs = speech_runs(frames.probabilities)
    if segment is None:
        return [*_measured_windows(whole, config, frames, runs)]
    return [*_segments(whole, config, frames, runs, segment)]


def _segments(
    whole: WholeEntry, config: PrepareConfig, frames: SpeechFrames, runs: Spans, segment: SegmentConfig
) -> Iterator[Found]:
    """Yields the cuts of a recording between its pauses."""
    row, num_frames = whole.row, len(frames.powers)
    plan = plan_cuts(runs, frames.probabilities, FrameRules.of(segment))
    if num_frames:
        yield _totals(frames, runs, plan.spans, num_in_speech=plan.num_in_speech)
    if num_frames and not len(runs):
        part = _part(row, 0, num_frames)
        yield whole.reject(part, "no_speech", f"no speech in {part['duration']:.6g} s")
    powers = FramePowers(frames.powers, runs)
    for start, stop in plan.spans.tolist():
        part = _part(row, start, stop)
        reject = check_length(whole.entry, part, config)
        if reject:
            yield whole.reject(part, reject.reason, reject.detail)
        else:
            yield _chosen(whole, part, config, powers.measure(start, stop))
    if frames.error:
        rest = _part(row, num_frames, math.ceil(row["duration"] / FRAME_SECONDS))
        yield whole.reject(rest, frames.error.reason, str(frames.error))


def _measured_windows(whole: WholeEntry, config: PrepareConfig, frames: SpeechFrames, runs: Spans) -> Iterator[Found]:
    """Yields the cut of an entry, or its windows, with their measures."""
    powers = FramePowers(frames.powers, runs)
    for window in windows(whole.row, config.window_seconds, config.sampling_rate):
        offset = window["start"] - whole.row["start"]
        start = math.floor(round(offset / FRAME_SECONDS, 6))
        stop = math.ceil(round((offset + window["duration"]) / FRAME_SECONDS, 6))
        if frames.error and stop > len(frames.powers):
            yield whole.reject(window, frames.error.reason, str(frames.error))
        else:
            yield _chosen(whole, window, config, powers.measure(start, stop))
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


def _chosen(whole: WholeEntry, row: dict[str, Any], config: PrepareConfig, measures: SpeechMeasures) -> Cut | Reject:
    """Returns a cut with its measures, or why there is too little or too noisy speech in it."""
    if reason := _why_left_out(measures, config):
        return whole.reject(row, *reason)
    # Windows share the custom fields and the recording of their row, which are modified later.
    row = {**row, "custom": {**(row.get("custom") or {}), **measures.fields()}, "recording": {**row["recording"]}}
    return finish(whole, row, config)


def _why_left_out(measures: SpeechMeasures, config: PrepareConfig) -> tuple[RejectReason, str] | None:
    if measures.level_db is None:
        return "no_speech", "no speech in the whole cut"
    if config.min_speech_share is not None and measures.share < config.min_speech_share:
        return "little_speech", f"the share of speech is {measures.share:g}, the minimum is {config.min_speech_share:g}"
    if config.min_snr_db is not None and measures.snr_db is not None and measures.snr_db < config.min_snr_db:
        return "low_snr", f"signal-to-noise ratio {measures.snr_db:g} dB, the minimum is {config.min_snr_db:g} dB"
    return None


def _part(row: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Returns a span of a cut in frames; the cut itself if the span is all of it."""
    offset, duration = _seconds(row, start, stop)
    return row if duration == row["duration"] else window_of(row, row["start"] + offset, duration)


def _seconds(row: dict[str, Any], start: int, stop: int) -> tuple[float, float]:
    """Returns offset and duration of a span in frames. The last frame may end after the cut."""
    offset, end = round(start * FRAME_SECONDS, 6), min(round(stop * FRAME_SECONDS, 6), row["duration"])
    return offset, round(end - offset, 9) if offset else end


def _content(whole: WholeEntry, config: PrepareConfig) -> bytes | None:
    """Returns the bytes of audio that is not a local file. A command is run once for the whole recording.

    Raises:
        AudioError: The command fails.
    """
    row = whole.row
    if whole.audio.member:
        return whole.audio.read()
    source = next(source for source in row["recording"]["sources"] if row["channel"] in source["channels"])
    if source["type"] == "file":
        return None
    try:
        return content_of(source, row["id"], allow_commands=config.allow_commands)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise AudioError.because("unreadable", f"{source['source']!r}: {error}") from error
