"""Transcribes speech while it arrives, with a recogniser that `finetune_ctc/finetune.py` wrote from a checkpoint.

    python examples/live_text.py recogniser talk.flac
    arecord -q -f S16_LE -c 1 -r 16000 -t raw | python examples/live_text.py recogniser -

A file is read at the speed at which it was spoken, unless `--fast` is given. `-` reads raw 16-bit samples of one
channel at 16 kHz from standard input, such as those of a microphone. The text appears on standard output
chunk by chunk.
"""

import argparse
import sys
import time
from pathlib import Path

from finetune_ctc.live_model import LiveRecogniser, Transcriber
from live_frames import parts_of

from nestdata import NestError
from nestmodel import parse_context


def main(argv: list[str] | None = None) -> str:
    """Prints the text as it is recognised, and returns all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recogniser", type=Path, help="directory that finetune.py wrote")
    parser.add_argument("audio", help="file of one channel at the sampling rate of the model, or -")
    parser.add_argument("--context", type=parse_context, help="attention context, such as 70,6")
    parser.add_argument("--fast", action="store_true", help="do not wait for the audio")
    arguments = parser.parse_args(argv)
    transcriber = Transcriber(LiveRecogniser.from_pretrained(arguments.recogniser), arguments.context)
    left, right = transcriber.stream.context
    print(f"context {left},{right}, chunks of {transcriber.stream.chunk_s:g} s", file=sys.stderr)
    heard_s, busy_s = 0.0, 0.0
    for samples, rate in parts_of(arguments.audio, waits=not arguments.fast):
        began = time.perf_counter()
        new = transcriber.feed(samples, rate)
        heard_s, busy_s = heard_s + len(samples) / rate, busy_s + time.perf_counter() - began
        print(new, end="", flush=True)
    print(transcriber.close())
    print(f"{busy_s:.2f} s of computing for {heard_s:.2f} s of audio", file=sys.stderr)
    return transcriber.text


if __name__ == "__main__":
    try:
        main()
    except NestError as error:
        sys.exit(f"error: {error}")
