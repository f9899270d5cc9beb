"""Transcribes audio files with a recogniser that `finetune.py` wrote.

    python examples/finetune_ctc/transcribe.py recogniser a.wav b.flac

Prints one line for each file: its path, a tab, and the text. Files may have any sampling rate and any length. The
directory is an ordinary model of transformers: this is its pipeline for speech recognition, with audio that is read
by soundfile, so that ffmpeg is not needed.
"""

import argparse
from pathlib import Path

import soundfile
from transformers import pipeline


def main(argv: list[str] | None = None) -> list[str]:
    """Prints and returns the texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory that finetune.py wrote")
    parser.add_argument("audio", type=Path, nargs="+", help="audio files")
    args = parser.parse_args(argv)
    recogniser = pipeline("automatic-speech-recognition", model=str(args.model))
    texts = []
    for path in args.audio:
        samples, sampling_rate = soundfile.read(path, dtype="float32", always_2d=True)  # (samples, channels)
        audio = {"raw": samples.mean(axis=1), "sampling_rate": sampling_rate}
        # Windows of 30 s that overlap by 5 s at each end, so that memory does not grow with the length of a file.
        texts.append(recogniser(audio, chunk_length_s=30, stride_length_s=5)["text"])
        print(f"{path}\t{texts[-1]}")
    return texts


if __name__ == "__main__":
    main()
