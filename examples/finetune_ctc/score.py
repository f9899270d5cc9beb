"""Scores a recogniser that `finetune.py` wrote on one or more manifests with transcripts.

    python examples/finetune_ctc/score.py recogniser dev.json test.json -o scores

Decoding is greedy: the most likely token of each frame, without a language model. OUTPUT receives the prepared
manifests with their rejects, NAME.jsonl (transcripts beside what was recognised) and `scores.json`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from finetune import labelled, prepare, recognise, score
from transformers import AutoModelForCTC, AutoProcessor
from transformers.utils.logging import disable_progress_bar


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Scores all manifests, and returns what `scores.json` contains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory that finetune.py wrote")
    parser.add_argument("manifests", type=Path, nargs="+", help="manifests with transcripts")
    parser.add_argument("-o", "--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--batch-seconds", type=float, default=60.0, help="largest duration of a batch, in seconds")
    args = parser.parse_args(argv)
    names = [path.name.partition(".")[0] for path in args.manifests]
    if len(set(names)) < len(names):
        parser.error(f"the manifests are called {', '.join(names)}: give files with different names")
    disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCTC.from_pretrained(args.model).to(device)
    processor = AutoProcessor.from_pretrained(args.model)
    args.output.mkdir(parents=True, exist_ok=True)
    sampling_rate = processor.feature_extractor.sampling_rate
    scores = {}
    for name, manifest in zip(names, args.manifests, strict=True):
        corpus = prepare(manifest, args.output / f"{name}.corpus", sampling_rate, None)
        if not labelled(corpus):
            raise SystemExit(f"{manifest}: no utterance has a transcript to score against.")
        lines = recognise(model, processor, corpus, args.batch_seconds)
        written = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (args.output / f"{name}.jsonl").write_text(written, encoding="utf-8")
        scores[name] = score(lines)
        words, characters = (
            f"{rate['rate']:.1%} (95 % interval {rate['low']:.1%} to {rate['high']:.1%})"
            for rate in (scores[name]["words"], scores[name]["characters"])
        )
        print(f"{name}: errors in words: {words}, in characters: {characters}", flush=True)
    (args.output / "scores.json").write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
    return scores


if __name__ == "__main__":
    main()
    sys.exit(0)
