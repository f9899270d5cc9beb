"""Encoders of the examples predict masked tokens of held-out speech better than the entropy of the tokens.

    python -m benchmarks run own_encoders REAL_SPEECH OUTPUT --language cs=TRAIN,TEST --language es=TRAIN,TEST

Trains SmallTransformer and a w2v-BERT of the same size from random weights, on each language, with three seeds. The
noise is that of REAL_SPEECH. The settings are those of the demo preset, which were not chosen on these lines, and block
lengths are the same in seconds. Runs that are in OUTPUT already are not made again.
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
import yaml
from transformers import Wav2Vec2BertConfig, Wav2Vec2BertModel

from benchmarks.harness.arguments import benchmark_parser
from benchmarks.harness.children import run_command
from benchmarks.harness.report import Report, machine, versions
from benchmarks.harness.repository import REPOSITORY
from benchmarks.learning.parts.manifests import by_speaker, language, read_manifest, write_lines
from benchmarks.learning.parts.pretraining import prepare
from nestdata import Corpus
from nestmodel.training.callbacks.curves import read_metrics

QUICK = None
SEEDS = 3
T_95 = 4.303
"""Student's t for 95 % and two degrees of freedom: the interval of the mean of three seeds."""

EXAMPLES = REPOSITORY / "examples"
W2V_BERT = {
    "encoder": {"class_path": "encoders.W2vBert", "init_args": {"name": "w2v_bert"}},
    "masking": {"block_size": 8, "prob": 0.06},  # of frames of 20 ms
}
ENCODERS = {
    "SmallTransformer": yaml.safe_load((EXAMPLES / "own_encoder" / "own_encoder.yaml").read_text())["model"]["config"],
    "w2v-BERT": W2V_BERT,
}


def main() -> int:
    """Makes the runs that are missing, and writes the result."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("real_speech", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--language", type=language, action="append", required=True, metavar="NAME=TRAIN,TEST")
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    sides = {name: [read_manifest(Path(path)) for path in paths] for name, *paths in arguments.language}
    noise = by_speaker(arguments.real_speech)["noise"]
    for name, lines in [
        ("noise", noise),
        *((f"{name}-{i}", sides[name][i]) for name in sides for i in (0, 1)),
    ]:
        if not (output / f"{name}.corpus").exists():
            write_lines(output / f"{name}.json", lines)
            prepare(f"{name}.json", output)
    _write_models(output)
    for name, encoder, seed in product(sides, ENCODERS, range(SEEDS)):
        if not (output / _folder(name, encoder, seed)).exists():
            command = _command(name, encoder, seed, arguments.steps)
            paths = ":".join(str(EXAMPLES / folder) for folder in ("own_encoder", "continue_w2v_bert"))
            run_command(command, output, PYTHONPATH=paths)
    _report(output, list(sides), arguments.steps, arguments.results)
    return 0


def _write_models(output: Path) -> None:
    """Writes random weights of a small w2v-BERT, and a configuration for each encoder."""
    torch.manual_seed(0)
    sizes = Wav2Vec2BertConfig(hidden_size=144, num_hidden_layers=4, num_attention_heads=4, intermediate_size=576)
    Wav2Vec2BertModel(sizes).save_pretrained(output / "w2v_bert")
    for encoder, config in ENCODERS.items():
        (output / f"{encoder}.yaml").write_text(yaml.safe_dump({"model": {"config": config}}))


def _folder(corpus: str, encoder: str, seed: int) -> str:
    return f"{corpus}-{encoder}-{seed}"


def _command(corpus: str, encoder: str, seed: int, steps: int) -> str:
    return (
        f"nestmodel fit {corpus}-0.corpus --noise noise.corpus --val-corpus {corpus}-1.corpus --config demo "
        f"--config {encoder}.yaml --max-steps {steps} --val-check-interval {steps} --seed {seed} "
        f"--accelerator cpu -o {_folder(corpus, encoder, seed)}"
    )


def _report(output: Path, corpora: list[str], steps: int, results: Path | None) -> None:
    report = Report(
        "Encoders of the examples learn",
        __file__,
        f"{SEEDS} seeds, one run each, on {machine('CPU cores')}, "
        f"{versions('torch', 'transformers', 'pytorch-lightning')}.",
        results=results,
    )
    hours = "; ".join(
        f"{name}, {Corpus.open(output / f'{name}-0.corpus').hours:.2f} h for training and "
        f"{Corpus.open(output / f'{name}-1.corpus').hours:.2f} h held out"
        for name in corpora
    )
    report.text(
        "The columns are, in nats, the entropy of the tokens of held-out lines, and how far the loss is below it after "
        f"{steps} steps of the demo preset: mean and 95 % interval of the seeds, and each seed. Data: {hours}. The "
        "first weights of w2v-BERT are the same for all seeds. The encoders have different numbers of parameters and "
        "frames, so that their losses are not to be compared."
    )
    report.table(["corpus", "encoder", "entropy", "below by", "seeds"], _rows(output, corpora))


def _rows(output: Path, corpora: list[str]) -> Iterator[list[str]]:
    for name, encoder in product(corpora, ENCODERS):
        gains, entropies = [], []
        for seed in range(SEEDS):
            series = read_metrics(output / _folder(name, encoder, seed) / "version_0")
            loss, entropy = (series[f"val_{of}"][1][-1] for of in ("loss", "token_entropy"))
            gains.append(entropy - loss)
            entropies.append(entropy)
        half = T_95 * stdev(gains) / SEEDS**0.5
        yield [
            name,
            encoder,
            f"{mean(entropies):.2f}",
            f"{mean(gains):.3f} ± {half:.3f}",
            ", ".join(f"{gain:.3f}" for gain in gains),
        ]


if __name__ == "__main__":
    sys.exit(main())
