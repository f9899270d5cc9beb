"""Writes a manifest of Lhotse cuts with transcripts for each part of LibriSpeech.

    python recipes/librispeech/manifests.py data

Reads DIRECTORY/LibriSpeech by Lhotse's recipe, and writes DIRECTORY/cuts/PART.jsonl.gz. All seven parts must be there.
"""

import argparse
import sys
from pathlib import Path

from lhotse import CutSet
from lhotse.recipes.librispeech import LIBRISPEECH, prepare_librispeech


def main(argv: list[str] | None = None) -> None:
    """Writes the manifests of all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--jobs", type=int, default=8, help="threads that read headers of audio files")
    args = parser.parse_args(argv)
    corpus = args.directory / "LibriSpeech"
    missing = [part for part in LIBRISPEECH if not any((corpus / part).rglob("*.trans.txt"))]
    if missing:
        raise SystemExit(f"{corpus}: no transcripts of {', '.join(missing)}. Run download.py first.")
    (args.directory / "cuts").mkdir(exist_ok=True)
    for part, found in prepare_librispeech(corpus, dataset_parts=LIBRISPEECH, num_jobs=args.jobs).items():
        path = args.directory / "cuts" / f"{part}.jsonl.gz"
        cuts = CutSet.from_manifests(**found)
        cuts.to_file(path)
        print(f"{path}: {len(cuts)} cuts, {sum(cut.duration for cut in cuts) / 3600:.2f} h")


if __name__ == "__main__":
    main()
    sys.exit(0)
