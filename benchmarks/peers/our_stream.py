"""Encodes audio chunk by chunk with StreamingEncoder; streaming.py runs it."""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from nestmodel import StreamingEncoder, load_network


def main() -> int:
    """Writes the frames, and prints the seconds of each chunk as JSON, features included, and the growth of memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="checkpoint")
    parser.add_argument("audio", help="torch file: samples, shape (samples,)")
    parser.add_argument("frames", help="torch file to write: frames, shape (enc_frames, dim)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1, help="how often the audio is fed")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    stream = StreamingEncoder(load_network(arguments.model))
    audio = torch.load(arguments.audio)
    parts = audio.split(round(stream.chunk_s * 16000))
    frames: list[torch.Tensor] = []
    seconds = []
    first_mb = 0.0
    for repeat in range(arguments.repeats):
        for part in parts:
            began = time.perf_counter()
            encoded = stream.feed(part)
            seconds.append(time.perf_counter() - began)
            if repeat == 0:
                frames.append(encoded)
        if repeat == 0:
            first_mb = resident_mb()
    frames.append(stream.close())
    torch.save(torch.cat(frames), arguments.frames)
    print(json.dumps({"seconds": seconds, "growth_mb": resident_mb() - first_mb}))
    return 0


def resident_mb() -> float:
    """Returns the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


if __name__ == "__main__":
    sys.exit(main())
