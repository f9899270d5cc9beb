"""Decodes a recording block by block, and returns the probability of speech and the power of each frame.

Memory does not depend on the length of the recording, apart from eight bytes per frame of 32 ms, which is 0.9 MB for an
hour, from the encoded bytes of audio that is not in a local file, and from the samples of a recording whose transforms
need all of it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nestdata.audio.decode import at_rate, load_samples, samples_in
from nestdata.audio.lhotse_audio import needs_whole_cut
from nestdata.errors import AudioError
from nestdata.prepare.speech.detector import FRAME_SAMPLES, RATE, speech_probabilities, start_state

# About two minutes, which is 8 MB at 16 kHz and 50 MB in stereo at 48 kHz.
_BLOCK_FRAMES = 4096


class SpeechFrames(NamedTuple):
    """The frames of a recording, up to the first block that cannot be decoded."""

    probabilities: NDArray[np.float32]
    """Probability of speech, shape (num_frames,). The last frame may be partly after the end."""

    powers: NDArray[np.float32]
    """Mean square of the samples at 16 kHz, shape (num_frames,)."""

    error: AudioError | None
    """Why the recording could not be decoded up to its end."""


def speech_frames(row: Mapping[str, Any], content: bytes | None = None) -> SpeechFrames:
    """Finds speech in a cut of any length.

    Args:
        row: The cut as a dict, at the sampling rate of its file or with a transform to another one.
        content: The bytes of the audio file, as for `load_samples`.

    Raises:
        StorageError: Bytes cannot be read for a reason that says nothing about the audio.
    """
    row = {**row, "recording": at_rate(row["recording"], RATE)}
    num_samples = samples_in(row["duration"], RATE)
    probabilities, powers, state = list[NDArray[np.float32]](), list[NDArray[np.float32]](), start_state()
    block = _BLOCK_FRAMES * FRAME_SAMPLES
    whole, error = None, None
    for start in range(0, num_samples, block):
        length = min(block, num_samples - start)
        frames = np.zeros((-(-length // FRAME_SAMPLES), FRAME_SAMPLES), np.float32)
        samples = frames.reshape(-1)
        try:
            if start == 0 and needs_whole_cut(row["recording"]):
                whole = load_samples(row, content=content)
            if whole is None:
                load_samples(row, start=start, num_samples=length, out=samples[:length], content=content)
            else:
                samples[:length] = whole[start : start + length]
        except AudioError as caught:
            error = caught
            break
        found, state = speech_probabilities(samples, state)
        probabilities.append(found)
        squares = np.einsum("fs,fs->f", frames, frames)
        sizes = np.minimum(FRAME_SAMPLES, length - FRAME_SAMPLES * np.arange(len(frames)))
        powers.append((squares / sizes).astype(np.float32))
    empty = np.empty(0, np.float32)
    return SpeechFrames(np.concatenate([empty, *probabilities]), np.concatenate([empty, *powers]), error)
