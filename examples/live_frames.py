"""Encodes speech while it arrives, and prints when its frames come.

    python examples/live_frames.py last.ckpt talk.flac
    arecord -q -f S16_LE -c 1 -r 16000 -t raw | python examples/live_frames.py last.ckpt -

A file is read at the speed at which it was spoken, unless `--fast` is given. `-` reads raw 16-bit samples of one
channel at 16 kHz from standard input, such as those of a microphone. The model is a streaming encoder: see
docs/streaming.md.
"""

import argparse
import sys
import time
from collections.abc import Iterator

import numpy as np
import soundfile
from numpy.typing import NDArray

from nestdata import NestError
from nestmodel import StreamingEncoder, load_network, parse_context


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each chunk, and returns the number of frames."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint or .nemo file")
    parser.add_argument("audio", help="file of one channel at the sampling rate of the model, or -")
    parser.add_argument("--context", type=parse_context, help="attention context, such as 70,6")
    parser.add_argument("--fast", action="store_true", help="do not wait for the audio")
    arguments = parser.parse_args(argv)
    stream = StreamingEncoder(load_network(arguments.model), arguments.context)
    print(f"context {stream.context[0]},{stream.context[1]}, chunks of {stream.chunk_s:g} s")
    num_frames, heard_s, busy_s = 0, 0.0, 0.0
    for samples, rate in parts_of(arguments.audio, waits=not arguments.fast):
        began = time.perf_counter()
        frames = stream.feed(samples, rate)
        took = time.perf_counter() - began
        heard_s, busy_s, num_frames = heard_s + len(samples) / rate, busy_s + took, num_frames + len(frames)
        if len(frames):
            print(f"{heard_s:8.2f} s heard: {len(frames)} frames, {num_frames} in total, in {1000 * took:.0f} ms")
    num_frames += len(stream.close())
    print(f"{num_frames} frames; {busy_s:.2f} s of computing for {heard_s:.2f} s of audio")
    return num_frames


def parts_of(audio: str, *, waits: bool) -> Iterator[tuple[NDArray[np.float32], int]]:
    """Yields samples and sampling rate, a tenth of a second at a time."""
    if audio == "-":
        while data := sys.stdin.buffer.read(2 * 1600):
            yield np.frombuffer(data[: len(data) // 2 * 2], np.int16).astype(np.float32) / 32768, 16000
        return
    began, heard_s = time.monotonic(), 0.0
    with soundfile.SoundFile(audio) as file:
        for samples in file.blocks(file.samplerate // 10, dtype="float32"):
            heard_s += len(samples) / file.samplerate
            if waits:
                time.sleep(max(0.0, began + heard_s - time.monotonic()))
            yield samples, file.samplerate


if __name__ == "__main__":
    try:
        main()
    except NestError as error:
        sys.exit(f"error: {error}")
