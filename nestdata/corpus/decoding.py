"""Measures how long this process takes to decode cuts, and to read the same samples from a sample bank."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestdata.corpus.bank import FULL_SCALE, RECORD, SampleBank
from nestdata.corpus.corpora import Corpora
from nestdata.corpus.members import fetch
from nestdata.errors import AudioError, ConfigError
from nestdata.storage import is_url


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingTime:
    """Seconds and bytes to load some cuts as they are stored, and as 16-bit samples."""

    audio_s: float
    """Length of the cuts in seconds."""

    load_s: float
    """Seconds to load them as the corpus stores them."""

    bank_s: float
    """Seconds to load the same samples from a bank in memory."""

    stored_bytes: float
    """Bytes of the audio of these cuts, as the corpus stores it."""

    bank_bytes: int
    """Bytes of the same audio in a bank."""


def time_decoding(corpora: Corpora, indices: Sequence[int], max_seconds: float = 1.0) -> DecodingTime:
    """Loads cuts, twice: as they are stored, and from a bank that is made of their samples in memory.

    Files that were read a moment ago are still in the page cache, so this measures the processor and not the disk.
    Bytes from object stores are fetched before the time is taken, for the same reason.

    Args:
        corpora: Corpora that the indices count through.
        indices: Cuts to load, at least one.
        max_seconds: Time after which no further cut is loaded, in seconds.

    Raises:
        AudioError: None of the cuts can be loaded.
        ConfigError: No cuts are given.
    """
    if not len(indices):
        raise ConfigError("there are no cuts to decode: give the indices of some.")
    loaded: list[int] = []
    samples: list[NDArray[np.int16]] = []
    load_s = stored = 0.0
    for index in indices:
        out = np.zeros(corpora.num_samples_of(index), np.float32)
        try:
            content = _remote_content(corpora, index)
            before = time.perf_counter()
            corpora.load(index, out=out, content=content)
        except AudioError:
            if len(loaded) == 0 and index == indices[-1]:
                raise
            continue
        load_s += time.perf_counter() - before
        loaded.append(index)
        samples.append(np.clip(np.rint(FULL_SCALE * out), -FULL_SCALE, FULL_SCALE - 1).astype("<i2"))
        stored += 2 * len(out) if corpora.has_bank(index) else _stored_bytes(corpora, index)
        if load_s > max_seconds:
            break
    num_samples = sum(map(len, samples))
    return DecodingTime(
        audio_s=num_samples / corpora.sampling_rate,
        load_s=load_s,
        bank_s=_time_bank(corpora, loaded, samples),
        stored_bytes=stored,
        bank_bytes=2 * num_samples,
    )


def _time_bank(corpora: Corpora, indices: list[int], samples: list[NDArray[np.int16]]) -> float:
    """Returns the seconds to load cuts from a bank, the lookup of their lines included."""
    records = np.zeros(len(samples), RECORD)
    records["start"] = np.cumsum([0, *map(len, samples[:-1])])
    records["gain"] = 1 / FULL_SCALE
    bank = SampleBank(np.concatenate(samples), records)
    outputs = [np.zeros(len(each), np.float32) for each in samples]
    before = time.perf_counter()
    for number, (index, out) in enumerate(zip(indices, outputs, strict=True)):
        bank.read(number, corpora.line(index)["id"], 0, out)
    return time.perf_counter() - before


def _remote_content(corpora: Corpora, index: int) -> bytes | None:
    """Returns the bytes of a cut if they are in an object store."""
    if corpora.has_bank(index):
        return None
    address = corpora.address(index)
    return fetch(address, corpora.line(index)["id"]) if address and is_url(address.location) else None


def _stored_bytes(corpora: Corpora, index: int) -> float:
    """Returns the bytes of the audio of a cut, in proportion to the part of the recording that the cut covers."""
    line, address = corpora.line(index), corpora.address(index)
    recording = line["recording"]
    if address:
        size = address.length
    else:
        paths = [source["source"] for source in recording["sources"] if source["type"] == "file"]
        size = sum(os.path.getsize(path) for path in paths if os.path.isfile(path))
    return size * min(1.0, float(line["duration"]) / float(recording["duration"]))
