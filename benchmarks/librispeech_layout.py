"""Writes transcribed speech in the layout of LibriSpeech, to try the recipe for LibriSpeech.

    python benchmarks/librispeech_layout.py train.json dev.json DATA --group-by scene
    python recipes/librispeech/run.py DATA OUTPUT --stages manifests corpora pretrain export finetune score ...

The manifests are NeMo's. Groups of `train.json` become, in turn, the speakers of the three parts for training, and
groups of `dev.json` the speakers of the other four, so that no group is in two parts.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from nestdata import Corpus, prepare_corpus
from nestmodel.evaluate.inputs import cut_labels

TRAIN = ("train-clean-100", "train-clean-360", "train-other-500")
OTHERS = ("dev-clean", "dev-other", "test-clean", "test-other")
RATE = 16000

Utterance = tuple[NDArray[np.float32], str]


def write_layout(directory: Path, parts: Mapping[str, Iterable[Iterable[Utterance]]]) -> None:
    """Writes DIRECTORY/LibriSpeech, as the archives of LibriSpeech contain it, with FLAC files and upper-case texts.

    Args:
        directory: Receives the folder LibriSpeech.
        parts: For each part its speakers, each of them with utterances: samples at 16 kHz and a text.
    """
    speaker = 0
    for part, speakers in parts.items():
        for utterances in speakers:
            speaker += 1
            chapter = directory / "LibriSpeech" / part / f"{speaker}" / "1"
            chapter.mkdir(parents=True)
            lines = []
            for number, (samples, text) in enumerate(utterances):
                name = f"{speaker}-1-{number:04}"
                soundfile.write(chapter / f"{name}.flac", samples, RATE)
                lines.append(f"{name} {' '.join(text.upper().split())}\n")
            (chapter / f"{speaker}-1.trans.txt").write_text("".join(lines), encoding="utf-8")


def main() -> int:
    """Writes the layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("dev", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--group-by", required=True, help="field of the lines whose values become speakers")
    arguments = parser.parse_args()
    parts: dict[str, list[list[Utterance]]] = {}
    for manifest, names in ((arguments.train, TRAIN), (arguments.dev, OTHERS)):
        speakers = read_groups(manifest, arguments.group_by)
        parts |= {name: speakers[number :: len(names)] for number, name in enumerate(names)}
    write_layout(arguments.output, parts)
    return 0


def read_groups(manifest: Path, field: str) -> list[list[Utterance]]:
    """Returns the utterances of a manifest by the value of a field, in the order of the values."""
    groups: dict[str, list[Utterance]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        prepare_corpus([manifest], Path(directory) / "corpus")
        corpus = Corpus.open(Path(directory) / "corpus")
        for row in range(len(corpus)):
            cut = corpus.line(row)
            text = " ".join(one.get("text") or "" for one in cut["supervisions"])
            groups[str(cut_labels(cut)[field])].append((corpus.load(row)[1], text))
    return [groups[name] for name in sorted(groups)]


if __name__ == "__main__":
    sys.exit(main())
