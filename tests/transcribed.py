"""Two transcribed utterances of the demo corpus."""

import json
from pathlib import Path

import soundfile
import torch

from nestdata.filters import make_resampler

DEMO = Path(__file__).parents[1] / "manifests" / "demo"
TEXTS = {"en_f3_01": "good morning everyone", "en_f3_02": "the kettle is on do you want tea"}


def write_transcribed(directory: Path) -> Path:
    """Writes a manifest of two utterances of the demo corpus, and each of them as a WAV in stereo at 48 kHz."""
    lines = [json.loads(line) for line in (DEMO / "speech.json").read_text().splitlines()]
    lines = [line for line in lines if Path(line["audio_filepath"]).stem in TEXTS]
    for line in lines:
        line["audio_filepath"] = str(DEMO / line["audio_filepath"])
        samples, rate = soundfile.read(line["audio_filepath"], dtype="float32")
        resampled = make_resampler(rate, 48000)(torch.from_numpy(samples))
        stereo = resampled[:, None].expand(-1, 2).numpy()
        soundfile.write(directory / f"{Path(line['audio_filepath']).stem}.wav", stereo, 48000)
    (directory / "two.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory / "two.json"
