"""Judges the parts of an entry: by the speech in them, and by decoding them if the configuration asks for that."""

import sys
from typing import Any

from nestdata.audio.decode import SILENCE_DB, at_rate, energy, load_samples, samples_in
from nestdata.audio.lhotse_audio import needs_whole_cut
from nestdata.errors import AudioError
from nestdata.prepare.config import PrepareConfig
from nestdata.prepare.divide import Divided, Part
from nestdata.prepare.inputs.audio import File, RejectReason
from nestdata.prepare.read import WholeEntry, source_rate
from nestdata.prepare.speech.measures import SpeechMeasures, SpeechTotals
from nestdata.prepare.writing.found import Cut, Reject

# Samples of all channels that are decoded at a time, in 256 MiB.
_MAX_DECODED = 1 << 26


def judge(whole: WholeEntry, divided: list[Divided], config: PrepareConfig) -> list[Cut | Reject | SpeechTotals]:
    """Returns the cuts at the rate of the corpus, with a reject in the place of each part that is not taken.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    return [_judged(whole, found, config) if isinstance(found, Part) else found for found in divided]


def _judged(whole: WholeEntry, part: Part, config: PrepareConfig) -> Cut | Reject:
    row, measures = part
    if measures:
        if problem := _speech_problem(measures, config):
            return whole.reject(row, *problem)
        row = {**row, "custom": {**(row.get("custom") or {}), **measures.fields()}}
    num_samples = samples_in(row["duration"], config.sampling_rate)
    row["recording"] = _resampled(row["recording"], config.sampling_rate)
    if config.probe == "decode" and (problem := _decoding_problem(whole, row, num_samples)):
        return whole.reject(row, *problem)
    audio = whole.audio
    if isinstance(audio, File) and audio.stored_path:
        # A copy of audio in the corpus directory is moved and copied with it, which may change its time.
        row["recording"]["sources"] = [{**row["recording"]["sources"][0], "source": audio.stored_path}]
        return Cut(row, num_samples)
    return Cut(row, num_samples, audio.member, whole.version)


def _speech_problem(measures: SpeechMeasures, config: PrepareConfig) -> tuple[RejectReason, str] | None:
    if measures.level_db is None:
        return "no_speech", "no speech in the whole cut"
    if config.min_speech_share is not None and measures.share < config.min_speech_share:
        return "little_speech", f"the share of speech is {measures.share:g}, the minimum is {config.min_speech_share:g}"
    if config.min_snr_db is not None and measures.snr_db is not None and measures.snr_db < config.min_snr_db:
        return "low_snr", f"signal-to-noise ratio {measures.snr_db:g} dB, the minimum is {config.min_snr_db:g} dB"
    return None


def _resampled(recording: dict[str, Any], rate: int) -> dict[str, Any]:
    """Returns a copy of a recording at a rate; if it is resampled, it lasts as long as its samples there."""
    found = at_rate(recording, rate)
    if recording["sampling_rate"] != rate:
        found["duration"] = found["num_samples"] / rate
    return found


def _decoding_problem(whole: WholeEntry, row: dict[str, Any], num_samples: int) -> tuple[RejectReason, str] | None:
    """Decodes a cut from start to end; returns why its audio cannot be used."""
    block, found = _samples_at_a_time(row), 0.0
    try:
        content = whole.audio.read()
        for start in range(0, num_samples, block):
            size = min(block, num_samples - start)
            samples = load_samples(row, start=start, num_samples=size, content=content)
            found += energy(samples)
    except AudioError as error:
        return error.reason, str(error)
    if found < 10 ** (SILENCE_DB / 10) * num_samples:
        return "silent", f"the level of the whole cut is below {SILENCE_DB:g} dB of full scale"
    return None


def _samples_at_a_time(row: dict[str, Any]) -> int:
    """Returns how many samples of a cut may be decoded at a time; all, if each part would need the whole cut."""
    recording = row["recording"]
    if needs_whole_cut(recording):
        return sys.maxsize
    ratio = max(1.0, source_rate(recording) / recording["sampling_rate"])
    return max(1, int(_MAX_DECODED / ratio / max(len(source["channels"]) for source in recording["sources"])))
