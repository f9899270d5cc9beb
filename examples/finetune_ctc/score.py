"""Scores a recogniser that `finetune.py` wrote on one or more manifests with transcripts.

    python examples/finetune_ctc/score.py recogniser dev.json test.json -o scores

Decoding is greedy: the most likely token of each frame, without a language model. A recogniser for live speech is
scored in each of its attention contexts, or in those of `--context`. OUTPUT receives the prepared manifests with their
rejects, NAME.jsonl (transcripts beside what was recognised) and `scores.json`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from finetune import LiveProcessor, Model, Processor, labelled, prepare, score_corpus
from live_model import NETWORK_FILE, LiveFeatures, LiveRecogniser, check_recogniser
from transformers import AutoModelForCTC, AutoProcessor, ParakeetTokenizer
from transformers.utils.logging import disable_progress_bar

from nestdata import NestError
from nestmodel import parse_context


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Scores all manifests, and returns what `scores.json` contains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory that finetune.py wrote")
    parser.add_argument("manifests", type=Path, nargs="+", help="manifests with transcripts")
    parser.add_argument("-o", "--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--batch-seconds", type=float, default=60.0, help="largest duration of a batch, in seconds")
    parser.add_argument(
        "--context",
        dest="contexts",
        type=parse_context,
        action="append",
        help="attention context of a recogniser for live speech, such as 70,6; repeat it for several. --context=-1,-1 "
        "has no limit",
    )
    args = parser.parse_args(argv)
    check_recogniser(args.model)
    if args.contexts and not (args.model / NETWORK_FILE).exists():
        parser.error(f"{args.model} is not a recogniser for live speech, which alone has contexts: drop --context")
    names = [path.name.partition(".")[0] for path in args.manifests]
    if len(set(names)) < len(names):
        parser.error(f"the manifests are called {', '.join(names)}: give files with different names")
    disable_progress_bar()
    model, processor = load(args.model)
    args.output.mkdir(parents=True, exist_ok=True)
    sampling_rate = processor.feature_extractor.sampling_rate
    scores = {}
    for name, manifest in zip(names, args.manifests, strict=True):
        corpus = prepare(manifest, args.output / f"{name}.corpus", sampling_rate, None)
        if not labelled(corpus):
            raise SystemExit(f"{manifest}: no utterance has a transcript to score against.")
        path = args.output / f"{name}.jsonl"
        scores[name] = score_corpus(model, processor, corpus, path, args.batch_seconds, args.contexts)
    (args.output / "scores.json").write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
    return scores


def load(directory: Path) -> tuple[Model, Processor]:
    """Loads a recogniser and what computes its features and its text; a GPU is used if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not (directory / NETWORK_FILE).exists():
        return AutoModelForCTC.from_pretrained(directory).to(device), AutoProcessor.from_pretrained(directory)
    live = LiveRecogniser.from_pretrained(directory)
    processor = LiveProcessor(LiveFeatures(live.network), ParakeetTokenizer.from_pretrained(directory))
    return live.to(device), processor


if __name__ == "__main__":
    try:
        main()
    except NestError as error:
        sys.exit(f"error: {error}")
