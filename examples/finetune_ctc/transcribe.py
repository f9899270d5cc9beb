"""Transcribes audio files with a recogniser that `finetune.py` wrote.

    python examples/finetune_ctc/transcribe.py recogniser a.wav b.flac

Prints one line for each file: its path, a tab, and the text. Files may have any sampling rate and any length. The
directory is an ordinary model of transformers: this is its pipeline for speech recognition, with audio that is read
by soundfile, so that ffmpeg is not needed. `live_text.py` does this with a recogniser for live speech.
"""

import argparse
from pathlib import Path

import numpy as np
import soundfile
from live_model import NETWORK_FILE, check_recogniser
from transformers import pipeline
from transformers.utils.logging import disable_progress_bar

WINDOW_S, OVERLAP_S = 30, 5
"""Longer files are recognised in windows that overlap on both sides, so that memory does not grow with the length."""


def main(argv: list[str] | None = None) -> list[str]:
    """Prints and returns the texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory that finetune.py wrote")
    parser.add_argument("audio", type=Path, nargs="+", help="audio files")
    args = parser.parse_args(argv)
    if missing := [str(path) for path in args.audio if not path.is_file()]:
        parser.error(f"there is no file {', '.join(missing)}: give audio files that exist, after the model")
    check_recogniser(args.model)
    if (args.model / NETWORK_FILE).exists():
        parser.error(f"{args.model} is a recogniser for live speech: transcribe with examples/live_text.py --fast")
    disable_progress_bar()
    recogniser = pipeline("automatic-speech-recognition", model=str(args.model))
    texts = []
    for path in args.audio:
        samples, sampling_rate = soundfile.read(path, dtype="float32", always_2d=True)  # (samples, channels)
        audio, windows = samples.mean(axis=1), {}
        if len(audio) > WINDOW_S * sampling_rate:
            # The pipeline drops the last encoder frame of a file that it cuts into windows: let it be silence.
            audio = np.concatenate([audio, np.zeros(sampling_rate // 10, np.float32)])
            windows = {"chunk_length_s": WINDOW_S, "stride_length_s": OVERLAP_S}
        texts.append(recogniser({"raw": audio, "sampling_rate": sampling_rate}, **windows)["text"])
        print(f"{path}\t{texts[-1]}")
    return texts


if __name__ == "__main__":
    main()
