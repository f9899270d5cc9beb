"""Fine-tunes a pretrained encoder to a CTC recogniser, and scores it on a test manifest.

    python examples/finetune_ctc/finetune.py ENCODER train.json test.json -o recogniser

ENCODER is the directory that `nestmodel export --to huggingface` wrote, or, of an encoder for live speech, a model
file: a checkpoint of `nestmodel fit` or a `.nemo` file. The manifests are of any format that `nestdata prepare` reads,
with transcripts. OUTPUT receives the model (for transformers' AutoModelForCTC with its processor, or for
`live_text.py`), the corpora, checkpoints, `options.json`, `test.jsonl` (transcripts beside what was recognised) and
`results.json`. A recogniser for live speech is scored in each of its attention contexts.

Batches are those of `nestdata.BatchPlan`: cuts of similar length, up to a number of seconds. Model and loss are those
of transformers or of `live_model.py`; optimizer, checkpoints and resuming are those of transformers, the tokeniser is
that of tokenizers, SpecAugment that of torchaudio.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from live_model import BLANK, UNKNOWN, LiveFeatures, LiveRecogniser
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoConfig,
    ParakeetCTCConfig,
    ParakeetEncoderConfig,
    ParakeetFeatureExtractor,
    ParakeetForCTC,
    ParakeetProcessor,
    ParakeetTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar

from nestdata import BatchPlan, Corpus, NestError, PlanConfig, PrepareConfig, derive_key, prepare_corpus
from nestmodel import (
    ConfigError,
    NestNetwork,
    StreamingEncoder,
    count_errors,
    error_rate,
    load_network,
    normalise_text,
    read_config,
)


@dataclass(frozen=True)
class LiveProcessor:
    """Features and tokens of a recogniser for live speech, as ParakeetProcessor has them."""

    feature_extractor: LiveFeatures
    tokenizer: ParakeetTokenizer

    def save_pretrained(self, directory: Path) -> None:
        """Writes the tokeniser; the settings of the features are in the checkpoint of the network."""
        self.tokenizer.save_pretrained(directory)


Model = ParakeetForCTC | LiveRecogniser
Processor = ParakeetProcessor | LiveProcessor


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Trains and scores a recogniser, and returns what `results.json` contains."""
    args = parse_arguments(argv)
    if not (args.encoder / "config.json").exists():
        read_config(args.encoder)  # an error says what it is, unless it is a model file
    write_or_compare_options(args)
    disable_progress_bar()
    torch.manual_seed(args.seed)
    if args.encoder.is_dir() and not isinstance(AutoConfig.from_pretrained(args.encoder), ParakeetEncoderConfig):
        raise SystemExit(f"{args.encoder}: no ParakeetEncoder. Pass the checkpoint of an encoder for live speech.")
    network = None if args.encoder.is_dir() else load_live_network(args)
    extractor = LiveFeatures(network) if network else ParakeetFeatureExtractor.from_pretrained(args.encoder)
    train = prepare(args.train, args.output / "train.corpus", extractor.sampling_rate, args.batch_seconds)
    test = prepare(args.test, args.output / "test.corpus", extractor.sampling_rate, None)  # all of it is scored
    if not labelled(test):
        raise SystemExit(f"{args.test}: no utterance has a transcript to score against.")
    num_shared = len(audio_spans(train) & audio_spans(test))
    if num_shared:
        print(f"warning: {num_shared} test utterances are also in {args.train}: error rates on them are too low")

    drawn = draw_labelled(train, args.labels, args.seed)
    tokenizer = train_tokenizer([transcript(train, row) for row in drawn], args.vocabulary)
    if network:
        processor, model = LiveProcessor(extractor, tokenizer), LiveRecogniser(network, tokenizer.backend_tokenizer)
        factor = network.config.encoder.subsampling_factor
    else:
        processor = ParakeetProcessor(extractor, tokenizer, decoder_type="ctc")
        model = build_model(args.encoder, processor, from_scratch=args.from_scratch)
        factor = model.config.encoder_config.subsampling_factor
        model.config.inputs_to_logits_ratio = (
            extractor.hop_length * factor
        )  # for long audio in the pipeline of transformers
    rows = [row for row in drawn if fits(train, row, tokenizer, extractor.hop_length, factor)]
    print(f"training on {len(rows)} utterances; {len(drawn) - len(rows)} have more tokens than frames and are left out")
    if not rows:
        raise SystemExit(f"{args.train}: no utterance is left to train on. Give transcripts, or a larger --vocabulary.")

    train_model(model, TrainingBatches(train, rows, processor, args), args)
    model.save_pretrained(args.output)
    processor.save_pretrained(args.output)

    sizes = {"num_train": len(rows), "num_left_out": len(drawn) - len(rows), "num_test_in_train": num_shared}
    results = {**sizes, **score_corpus(model, processor, test, args.output / "test.jsonl", args.batch_seconds)}
    (args.output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def load_live_network(args: argparse.Namespace) -> NestNetwork:
    """Loads the network of a model file, whose encoder can be streamed; from scratch, its weights are drawn anew."""
    config = replace(read_config(args.encoder), seed=args.seed)
    network = NestNetwork(config) if args.from_scratch else load_network(args.encoder)
    try:
        StreamingEncoder(network)
    except ConfigError as error:
        raise SystemExit(f"{args.encoder}: {error} Pass what `nestmodel export --to huggingface` writes.") from None
    return network


def prepare(manifest: Path, directory: Path, sampling_rate: int, max_seconds: float | None) -> Corpus:
    """Prepares a manifest and opens the corpus. Rejects are listed in `directory`, with the reasons."""
    config = PrepareConfig(sampling_rate=sampling_rate, max_seconds=max_seconds)
    report = prepare_corpus([manifest], directory, config, overwrite=True)
    print(f"{manifest}: {report.num_cuts} utterances, {report.hours:.2f} h, rejected: {report.rejected or 'none'}")
    return Corpus.open(directory)


def audio_spans(corpus: Corpus) -> set[tuple[str, float]]:
    """Returns the file and the first second of each cut."""
    cuts = map(corpus.line, range(len(corpus)))
    return {(cut["recording"]["sources"][0]["source"], cut["start"]) for cut in cuts}


def transcript(corpus: Corpus, row: int) -> str:
    """Returns the normalised transcript of a cut; an empty string if it has none."""
    return normalise_text(" ".join(supervision.get("text") or "" for supervision in corpus.line(row)["supervisions"]))


def labelled(corpus: Corpus) -> list[int]:
    """Returns the indices of the cuts that have a transcript."""
    return [row for row in range(len(corpus)) if transcript(corpus, row)]


def draw_labelled(corpus: Corpus, share: float, seed: int) -> list[int]:
    """Draws a share of the cuts that have a transcript, by a key of their id: a small draw is part of a larger one."""
    drawn = sorted(labelled(corpus), key=lambda row: derive_key(seed, f"labels/{corpus.line(row)['id']}"))
    return sorted(drawn[: round(share * len(drawn))])


def train_tokenizer(texts: list[str], vocabulary: int) -> ParakeetTokenizer:
    """Trains byte-pair encoding. A vocabulary below the number of characters gives a tokeniser of characters."""
    bpe = Tokenizer(models.BPE(unk_token=UNKNOWN))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = [UNKNOWN, BLANK]
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    )
    return ParakeetTokenizer(tokenizer_object=bpe, unk_token=UNKNOWN, pad_token=BLANK)


def build_model(encoder: Path, processor: ParakeetProcessor, *, from_scratch: bool) -> ParakeetForCTC:
    """Returns the encoder with a new CTC head. From scratch, its weights are drawn as torch's layers draw them."""
    settings, tokenizer = AutoConfig.from_pretrained(encoder), processor.tokenizer
    config = ParakeetCTCConfig(encoder_config=settings, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    if not from_scratch:
        return ParakeetForCTC.from_pretrained(encoder, config=config)
    model = ParakeetForCTC(config)
    for module in model.encoder.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def fits(corpus: Corpus, row: int, tokenizer: ParakeetTokenizer, hop_length: int, factor: int) -> bool:
    """Returns whether CTC can align a cut: it needs a frame for each token, and a blank between two equal tokens.

    The encoder writes a frame for every `factor` mel frames of `hop_length` samples, and for the rest of them. One with
    a causal subsampling may write one more, which is not counted.
    """
    tokens = tokenizer(transcript(corpus, row)).input_ids
    num_needed = len(tokens) + sum(first == second for first, second in pairwise(tokens))
    return num_needed <= math.ceil(corpus.num_samples_of(row) // hop_length / factor)


class TrainingBatches(torch.utils.data.Dataset):
    """One item for each optimizer step: the augmented features and the tokens of the cuts that the plan has for it."""

    def __init__(self, corpus: Corpus, rows: list[int], processor: Processor, args: argparse.Namespace) -> None:
        self.corpus, self.rows, self.processor, self.num_steps = corpus, np.array(rows), processor, args.steps
        plan = PlanConfig(max_batch_seconds=args.batch_seconds, microbatches_per_step=1, seed=args.seed)
        self.plan = BatchPlan(corpus.num_samples[self.rows], corpus.sampling_rate, plan)
        from torchaudio.transforms import SpecAugment  # beside any torch, as nestmodel has imported torchaudio

        self.augment = SpecAugment(
            n_time_masks=2, time_mask_param=20, n_freq_masks=2, freq_mask_param=15, p=0.2, zero_masking=True
        )

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        rows = self.rows[self.plan.indices(step, 0)].tolist()
        batch = load_features(self.corpus, rows, self.processor)
        feats = batch["input_features"].transpose(1, 2)[:, None]  # (batch, 1, mels, frames): masks for each utterance
        with torch.random.fork_rng(devices=[]):  # a resumed run draws the same masks: they depend on the step alone
            torch.manual_seed(derive_key(self.plan.config.seed, "masks", step))
            batch["input_features"] = self.augment(feats)[:, 0].transpose(1, 2)
        texts = [transcript(self.corpus, row) for row in rows]
        batch["labels"] = self.processor.tokenizer(texts, padding=True, return_tensors="pt").input_ids
        return batch


def load_features(corpus: Corpus, rows: list[int], processor: Processor) -> dict[str, Tensor]:
    """Returns the log-mel features of cuts and the mask of their valid frames."""
    audio = [corpus.load(row)[1] for row in rows]
    return dict(processor.feature_extractor(audio, sampling_rate=corpus.sampling_rate, return_tensors="pt"))


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the text above as it is, and the defaults of the options."""


class FreezeEncoder(TrainerCallback):
    """Keeps the encoder's weights as they are for the first steps, while the new head learns.

    The running statistics of batch norm adapt to the new audio from the first step.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:  # noqa: ARG002
        """Depends on the step alone, so that a resumed run does the same."""
        model.encoder.requires_grad_(state.global_step >= self.num_steps)


def train_model(model: Model, batches: TrainingBatches, args: argparse.Namespace) -> None:
    """Trains for all steps, or for those that are left after the last checkpoint."""
    settings = training_arguments(args)
    if settings.n_gpu > 1 or settings.world_size > 1:
        raise SystemExit("this example trains on one device: set CUDA_VISIBLE_DEVICES=0, and start one process.")
    trainer = Trainer(
        model,
        settings,
        train_dataset=batches,
        data_collator=lambda items: items[0],  # an item is a whole batch
        callbacks=[FreezeEncoder(0 if args.from_scratch else args.freeze_steps)],
    )
    trainer.train(resume_from_checkpoint=args.resume or None)


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
    """Returns the Trainer's settings: AdamW, and a cosine after a linear warm-up."""
    return TrainingArguments(
        output_dir=str(args.output / "checkpoints"),
        max_steps=args.steps,
        learning_rate=args.lr,
        warmup_steps=args.warmup_steps,
        lr_scheduler_type="cosine",
        adam_beta2=0.98,
        weight_decay=0.01,
        max_grad_norm=1.0,
        save_steps=args.save_steps,
        save_total_limit=2,
        logging_steps=max(1, args.steps // 40),
        per_device_train_batch_size=1,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=[],
        seed=args.seed,
    )


def score_corpus(
    model: Model,
    processor: Processor,
    corpus: Corpus,
    path: Path,
    batch_seconds: float,
    contexts: Sequence[tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """Recognises a corpus, writes transcripts beside what was recognised, and prints and returns the error rates.

    A recogniser for live speech has a score for each of `contexts`, by default for all of its own, under `contexts`.
    """
    if isinstance(model, LiveRecogniser):
        lines, scores = [], {"contexts": {}}
        for context in contexts or model.contexts:
            model.use_context(context)
            name = f"{context[0]},{context[1]}"
            found = recognise(model, processor, corpus, batch_seconds)
            scores["contexts"][name] = print_score(f"{path.stem}, context {name}", found)
            lines += [{"context": name, **line} for line in found]
    else:
        lines = recognise(model, processor, corpus, batch_seconds)
        scores = print_score(path.stem, lines)
    written = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(written, encoding="utf-8")
    return scores


def recognise(model: Model, processor: Processor, corpus: Corpus, batch_seconds: float) -> list[dict[str, str]]:
    """Recognises all cuts that have a transcript, with the most likely token of each frame.

    Batches have at most `batch_seconds` of audio, or a single cut that is longer.
    """
    rows = labelled(corpus)
    longest = max(corpus.num_samples_of(row) for row in rows) / corpus.sampling_rate
    settings = PlanConfig(max_batch_seconds=max(batch_seconds, longest), microbatches_per_step=1)
    plan = BatchPlan(corpus.num_samples[rows], corpus.sampling_rate, settings)
    model.eval()
    lines = {}
    for step in range(plan.steps_per_epoch):
        batch = [rows[index] for index in plan.indices(step, 0)]
        inputs = load_features(corpus, batch, processor)
        tokens = model.generate(**{name: value.to(model.device) for name, value in inputs.items()})
        for row, text in zip(batch, processor.tokenizer.batch_decode(tokens, skip_special_tokens=True), strict=True):
            lines[row] = {
                "id": corpus.line(row)["id"],
                "text": transcript(corpus, row),
                "recognised": normalise_text(text),
            }
    return [lines[row] for row in rows]


def print_score(name: str, lines: list[dict[str, str]]) -> dict[str, Any]:
    """Prints and returns the error rates in characters and words, with their 95 % intervals."""
    references, hypotheses = [line["text"] for line in lines], [line["recognised"] for line in lines]
    rates = {unit: error_rate(count_errors(references, hypotheses, unit)) for unit in ("characters", "words")}
    for unit, rate in rates.items():
        interval = f"95 % interval {rate.low:.1%} to {rate.high:.1%}"
        print(f"{name}: errors in {unit}: {rate.rate:.1%} ({interval})", flush=True)
    return {"num_test": len(lines), **{unit: rate._asdict() for unit, rate in rates.items()}}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("encoder", type=Path, help="directory of `nestmodel export --to huggingface`, or a file of a live encoder")
    add("train", type=Path, help="manifest with transcripts")
    add("test", type=Path, help="manifest with transcripts")
    add("-o", "--output", type=Path, required=True, default=argparse.SUPPRESS, help="directory to write")
    add("--from-scratch", action="store_true", help="use the encoder's architecture with new weights")
    add("--labels", type=float, default=1.0, help="share of the training utterances to use, drawn by --seed")
    add("--vocabulary", type=int, default=128, help="number of tokens; small values give characters")
    add("--steps", type=int, default=2000, help="optimizer steps")
    add(
        "--batch-seconds",
        type=float,
        default=60.0,
        help="largest duration of a batch, in seconds; longer cuts of the training manifest are rejected",
    )
    add("--lr", type=float, default=1e-3, help="largest learning rate")
    add("--warmup-steps", type=int, default=100, help="steps until the largest learning rate")
    add("--freeze-steps", type=int, default=100, help="first steps in which only the head learns")
    add("--save-steps", type=int, default=500, help="steps between checkpoints")
    add("--seed", type=int, default=0, help="seed of weights, order, augmentation and --labels")
    add("--resume", action="store_true", help="continue from the last checkpoint in OUTPUT")
    args = parser.parse_args(argv)
    if args.freeze_steps >= args.steps and not args.from_scratch:
        parser.error(
            f"--freeze-steps is {args.freeze_steps} of {args.steps} --steps, so that the encoder would never learn: "
            f"give a lower one, such as --freeze-steps {args.steps // 4} --warmup-steps {args.steps // 4}"
        )
    checkpoints = args.output / "checkpoints"
    has_checkpoint = checkpoints.exists() and get_last_checkpoint(str(checkpoints)) is not None
    if has_checkpoint and not args.resume:
        parser.error(f"{args.output} holds a run: pass --resume to continue it, or give another --output")
    if args.resume and not has_checkpoint:
        parser.error(f"{args.output} has no checkpoint to resume from: drop --resume")
    return args


def write_or_compare_options(args: argparse.Namespace) -> None:
    """Writes the options to OUTPUT, or compares them with those of the run that is resumed."""
    path = args.output / "options.json"
    options = {name: str(value) for name, value in vars(args).items() if name not in ("output", "resume")}
    if args.resume and path.exists():
        first = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name in options if options[name] != first.get(name)]
        if changed:
            changes = ", ".join(f"{name} was {first.get(name)} and is {options[name]}" for name in changed)
            raise SystemExit(f"{path}: {changes}. Resume with the same options, or give another --output.")
    args.output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except NestError as error:
        sys.exit(f"error: {error}")
